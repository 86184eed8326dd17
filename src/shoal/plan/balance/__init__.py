"""balance: which replica answers a request, which ranks compute which sequences. Torch-free.

``protocols`` says what a balancer promises, ``prefixes`` remembers who has seen which prompt;
``sequences`` says what an assigner promises, ``predicted`` how long its assignments take.
"""

from shoal.core.parts import PartTable

__all__ = ["ASSIGNERS", "BALANCERS"]

BALANCERS = PartTable(
    "balancer",
    {
        "prefix_aware": "shoal.plan.balance.replicas.prefix_aware:PrefixAware",
        "least_loaded": "shoal.plan.balance.replicas.least_loaded:LeastLoaded",
        "round_robin": "shoal.plan.balance.replicas.round_robin:RoundRobin",
    },
    about=(
        "Which of several replicas answers a request. Chosen by `balancer` of a serving job, "
        "or `shoal serve --balancer`."
    ),
    protocol="shoal.plan.balance.replicas.protocols:BalancerPart",
)

ASSIGNERS = PartTable(
    "assigner",
    {
        "packed": "shoal.plan.balance.sequences.packed:PackedAssigner",
        "bytescale": "shoal.plan.balance.sequences.bytescale:ByteScale",
        "flexsp": "shoal.plan.balance.sequences.flexsp:FlexSP",
    },
    about=(
        "Which ranks compute which sequences of a batch. Chosen by the key `batching` of a "
        "job; compared by `shoal explain balance`."
    ),
    protocol="shoal.plan.balance.sequences.assignment:SequenceAssigner",
)
