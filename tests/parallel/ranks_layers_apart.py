"""What each of four real ranks does for ``test_layers_apart``: every listed job."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from shoal.claims.lab.same_as_one import SeededWeights, on_rank, same_as_one
from shoal.parallel.comm.collectives import TorchComm

sys.path.insert(0, str(Path(__file__).parent))

from parallel_splits import config, job

WIDE, NARROW = {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}
# Each changes grids inside a stage: more and fewer ranks a sequence, at the ends and in between.
JOBS = (
    ({"dp": 2, "tp": 2}, {"layers": [{"blocks": 3, **WIDE}, {"blocks": 5}]}),
    ({"dp": 4}, {"layers": [{"blocks": 2}, {"blocks": 4, "dp": 2, "tp": 2}, {"blocks": 2}]}),
    (
        {"tp": 4, "vocab": "tp"},
        {
            "microbatch": 4,
            "layers": [
                {"blocks": 3, **WIDE, "shard": "zero3"},
                {"blocks": 2, "dp": 2, "tp": 2, "shard": "zero1", "recompute": "full"},
                {"blocks": 2, **WIDE, "shard": "zero2", "recompute": "full"},
                {"blocks": 1},
            ],
        },
    ),
    (
        {"dp": 2, "pp": 2, "stages": [5, 3]},
        {
            "dropout": 0.2,
            "layers": [
                {"blocks": 4, "dp": 1, "tp": 2},
                {"blocks": 2, "shard": "zero3"},
                {"blocks": 2, "dp": 1, "tp": 2, "recompute": "full"},
            ],
        },
    ),
    ({"dp": 4}, {"shard": "zero3", "layers": [{"blocks": 6}, {"blocks": 2, "shard": "zero1"}]}),
)


def every_job(comm: TorchComm) -> list[str]:
    """What does not equal one process, in words; rank 0 compares."""
    results = []
    shape = config(qk_norm=True, family="qwen3")
    for parallel, extra in JOBS:
        wanted = job(parallel, **extra)
        if comm.rank > 0:
            weights = SeededWeights(shape, wanted.seed, torch.float64)
            on_rank(wanted, weights, comm, documents=True, dtype=torch.float64)
            continue
        result = same_as_one(wanted, shape, documents=True, run=lambda on: on(comm))
        if not result.same:
            results.append(f"{parallel}: {result}")
    return results
