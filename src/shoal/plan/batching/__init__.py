"""plan.batching: who runs now, and who holds which block of the cache. Torch-free.

The door: the tables of schedulers, of those that do one phase of serving each, and of cache
bookkeeping. They promise what :mod:`shoal.ir.serving` and :mod:`shoal.ir.phases` say; the
engine and the simulator drive the same objects.
"""

from shoal.core.parts import PartTable

__all__ = ["KV_MANAGERS", "PHASES", "SCHEDULERS"]

SCHEDULERS = PartTable(
    "scheduler",
    {
        "fcfs": "shoal.plan.batching.fcfs:Fcfs",
        "prefill_first": "shoal.plan.batching.prefill_first:PrefillFirst",
        "static": "shoal.plan.batching.static:Static",
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
        "contiguous": "shoal.plan.batching.contiguous:Contiguous",
    },
)
