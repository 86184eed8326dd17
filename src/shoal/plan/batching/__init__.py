"""plan.batching: who runs now, and who holds which block of the cache. Torch-free.

The door: the tables of schedulers, of those that do one phase of serving each, of cache
bookkeeping and of preemption. All promise what :mod:`shoal.ir.serving` and
:mod:`shoal.ir.phases` say; the engine and the simulator drive the same objects.
"""

from shoal.core.parts import PartTable

__all__ = ["KV_MANAGERS", "PHASES", "PREEMPTIONS", "SCHEDULERS"]

SCHEDULERS = PartTable(
    "scheduler",
    {
        "fcfs": "shoal.plan.batching.fcfs:Fcfs",
        "fair": "shoal.plan.batching.fair:Fair",
        "prefill_first": "shoal.plan.batching.prefill_first:PrefillFirst",
        "static": "shoal.plan.batching.static:Static",
        "temporal_fusion": "shoal.plan.batching.temporal_fusion:TemporalFusion",
    },
)

PHASES = PartTable(
    "phase",
    {
        "prefill": "shoal.plan.batching.prefill:Prefill",
        "decode": "shoal.plan.batching.decode:Decode",
    },
)

KV_MANAGERS = PartTable(
    "kv",
    {
        "paged": "shoal.plan.batching.paged:Paged",
        "blockgroups": "shoal.plan.batching.blockgroups:BlockGroups",
        "contiguous": "shoal.plan.batching.contiguous:Contiguous",
        "distributed": "shoal.plan.batching.distributed:Distributed",
        "slots": "shoal.plan.batching.slots:Slots",
    },
)

PREEMPTIONS = PartTable(
    "preempt",
    {
        "recompute": "shoal.plan.batching.recompute:Recompute",
        "swap": "shoal.plan.batching.swap:Swap",
        "auto": "shoal.plan.batching.auto:Auto",
    },
)
