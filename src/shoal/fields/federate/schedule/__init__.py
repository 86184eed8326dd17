"""schedule: who works, how long, and when updates are aggregated."""

from shoal.core.parts import PartTable

__all__ = ["CLIENT_SCHEDULERS"]

CLIENT_SCHEDULERS = PartTable(
    "client_scheduler",
    {
        "fedavg": "shoal.fields.federate.schedule.fedavg:FedAvg",
        "tiered": "shoal.fields.federate.schedule.tiered:Tiered",
        "fedasync": "shoal.fields.federate.schedule.fedasync:FedAsync",
        "fedbuff": "shoal.fields.federate.schedule.fedbuff:FedBuff",
        "fedcompass": "shoal.fields.federate.schedule.fedcompass:FedCompass",
    },
    about=(
        "Which client works when, and when updates are aggregated. Chosen by the key `algorithm` "
        "of a job with `job: federate`."
    ),
    protocol="shoal.fields.federate.protocols:ClientScheduler",
)
