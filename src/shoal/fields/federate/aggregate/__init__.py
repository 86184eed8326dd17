"""aggregate: how updates become the next model."""

from shoal.core.parts import PartTable

__all__ = ["SERVER_OPTIMIZERS"]

SERVER_OPTIMIZERS = PartTable(
    "server_optimizer",
    {
        "sgd": "shoal.fields.federate.aggregate.optimizers:ServerSgd",
        "adam": "shoal.fields.federate.aggregate.optimizers:ServerAdam",
        "yogi": "shoal.fields.federate.aggregate.optimizers:ServerYogi",
    },
    about=(
        "How the combined update moves the model of the server. Chosen by the key `server` of a "
        "federated job."
    ),
    protocol="shoal.fields.federate.protocols:ServerOptimizer",
)
