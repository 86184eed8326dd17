"""plan.batching: who runs now, and how cache blocks are managed. Torch-free.

The tables of schedulers, of those that do one phase of serving each, of cache
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
    about=("Which requests run in the next step. Chosen by the key `scheduler` of a serving job."),
    protocol="shoal.ir.engine:SchedulerPart",
)

PHASES = PartTable(
    "phase",
    {
        "prefill": "shoal.plan.batching.schedulers.prefill:Prefill",
        "decode": "shoal.plan.batching.schedulers.decode:Decode",
    },
    about=(
        "Which requests run in the next step of an instance with one phase. "
        "Chosen by the keys `disagg.prefill.scheduler` and `disagg.decode.scheduler` of a "
        "serving job."
    ),
    protocol="shoal.ir.phases:PhasePart",
)

KV_MANAGERS = PartTable(
    "kv",
    {
        "paged": "shoal.plan.batching.cache.paged:Paged",
        "blockgroups": "shoal.plan.batching.cache.blockgroups:BlockGroups",
        "contiguous": "shoal.plan.batching.cache.contiguous:ContiguousCache",
        "distributed": "shoal.plan.batching.cache.distributed:Distributed",
        "slots": "shoal.plan.batching.cache.slots:Slots",
    },
    about="How cache blocks are managed. Chosen by the key `kv` of a serving job.",
    protocol="shoal.ir.engine:KVPart",
)

PREEMPTIONS = PartTable(
    "preempt",
    {
        "recompute": "shoal.plan.batching.preemption.recompute:Recompute",
        "swap": "shoal.plan.batching.preemption.swap:Swap",
        "auto": "shoal.plan.batching.preemption.auto:AutoPreempt",
    },
    about=(
        "What happens to the cache of a preempted request. Chosen by `preempt` of a serving job."
    ),
    protocol="shoal.ir.engine:PreemptPart",
)
