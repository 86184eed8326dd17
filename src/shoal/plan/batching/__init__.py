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
    about=("Which requests run in the next step. Chosen by the key `scheduler` of a serving job."),
    protocol="shoal.ir.engine:SchedulerPart",
)

PHASES = PartTable(
    "phase",
    {
        "prefill": "shoal.plan.batching.prefill:Prefill",
        "decode": "shoal.plan.batching.decode:Decode",
    },
    about=(
        "Which requests run in the next step of an instance that does one phase of serving. "
        "Chosen by the keys `disagg.prefill.scheduler` and `disagg.decode.scheduler` of a "
        "serving job."
    ),
    protocol="shoal.ir.phases:PhasePart",
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
    about="Who holds which block of the cache. Chosen by the key `kv` of a serving job.",
    protocol="shoal.ir.engine:KVPart",
)

PREEMPTIONS = PartTable(
    "preempt",
    {
        "recompute": "shoal.plan.batching.recompute:Recompute",
        "swap": "shoal.plan.batching.swap:Swap",
        "auto": "shoal.plan.batching.auto:Auto",
    },
    about=(
        "What becomes of the cache of a request that gives its blocks back. Chosen by "
        "`preempt` of a serving job."
    ),
    protocol="shoal.ir.engine:PreemptPart",
)
