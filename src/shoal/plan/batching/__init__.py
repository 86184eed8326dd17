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
        "fcfs": "shoal.plan.batching.schedulers.fcfs:Fcfs",
        "fair": "shoal.plan.batching.schedulers.fair:Fair",
        "prefill_first": "shoal.plan.batching.schedulers.prefill_first:PrefillFirst",
        "static": "shoal.plan.batching.schedulers.static:Static",
        "temporal_fusion": "shoal.plan.batching.schedulers.temporal_fusion:TemporalFusion",
    },
)

PHASES = PartTable(
    "phase",
    {
        "prefill": "shoal.plan.batching.schedulers.prefill:Prefill",
        "decode": "shoal.plan.batching.schedulers.decode:Decode",
    },
)

KV_MANAGERS = PartTable(
    "kv",
    {
        "paged": "shoal.plan.batching.cache.paged:Paged",
        "blockgroups": "shoal.plan.batching.cache.blockgroups:BlockGroups",
        "contiguous": "shoal.plan.batching.cache.contiguous:Contiguous",
        "distributed": "shoal.plan.batching.cache.distributed:Distributed",
        "slots": "shoal.plan.batching.cache.slots:Slots",
    },
)

PREEMPTIONS = PartTable(
    "preempt",
    {
        "recompute": "shoal.plan.batching.preemption.recompute:Recompute",
        "swap": "shoal.plan.batching.preemption.swap:Swap",
        "auto": "shoal.plan.batching.preemption.auto:Auto",
    },
)
