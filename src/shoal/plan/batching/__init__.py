"""plan.batching: who runs now, and who holds which block of the cache. Torch-free.

The door: the tables of schedulers and of cache bookkeeping. Both promise what
:mod:`shoal.ir.serving` says; the engine and the simulator drive the same objects.
"""

from shoal.core.parts import PartTable

__all__ = ["KV_MANAGERS", "SCHEDULERS"]

SCHEDULERS = PartTable(
    "scheduler",
    {
        "fcfs": "shoal.plan.batching.fcfs:Fcfs",
        "static": "shoal.plan.batching.static:Static",
    },
)

KV_MANAGERS = PartTable(
    "kv",
    {
        "paged": "shoal.plan.batching.paged:Paged",
        "contiguous": "shoal.plan.batching.contiguous:Contiguous",
    },
)
