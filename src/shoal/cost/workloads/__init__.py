"""cost.workloads: what arrives at a server, made up or read from a trace. Torch-free.

The table of workloads. ``protocols`` says what one promises, ``describe`` puts
arrivals into a few numbers, and ``drawing`` holds what the made-up ones share.
"""

from shoal.core.parts import PartTable

__all__ = ["WORKLOADS"]

WORKLOADS = PartTable(
    "workload",
    {
        "chat": "shoal.cost.workloads.chat:Chat",
        "code": "shoal.cost.workloads.code:Code",
        "summary": "shoal.cost.workloads.summary:SummaryWorkload",
        "multiturn": "shoal.cost.workloads.multiturn:Multiturn",
        "shared_prefix": "shoal.cost.workloads.shared_prefix:SharedPrefix",
        "azure": "shoal.cost.workloads.azure:Azure",
        "mooncake": "shoal.cost.workloads.mooncake:Mooncake",
        "trace": "shoal.cost.workloads.trace:TraceWorkload",
    },
    about=(
        "Which requests arrive, and when. Chosen by the key `workload` of a serving job, and "
        "by `--workload`."
    ),
    protocol="shoal.cost.workloads.protocols:Workload",
)
