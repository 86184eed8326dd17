"""balance: which of several replicas answers a request, one way a file. Torch-free.

``protocols`` says what a balancer promises, ``prefixes`` remembers who has seen which prompt.
"""

from shoal.core.parts import PartTable

__all__ = ["BALANCERS"]

BALANCERS = PartTable(
    "balancer",
    {
        "prefix_aware": "shoal.plan.balance.prefix_aware:PrefixAware",
        "least_loaded": "shoal.plan.balance.least_loaded:LeastLoaded",
        "round_robin": "shoal.plan.balance.round_robin:RoundRobin",
    },
)
