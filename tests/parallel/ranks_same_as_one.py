"""What each of four real ranks does for ``test_same_as_one_ranks``: every listed split."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from shoal.claims.lab.same_as_one import SeededWeights, on_rank, same_as_one
from shoal.parallel.comm.collectives import TorchComm

sys.path.insert(0, str(Path(__file__).parent))

from parallel_splits import FOUR, config, job


def every_split(comm: TorchComm) -> list[dict[str, Any]]:
    """Whether each split equals one process, and by how much it does not; rank 0 compares."""
    results: list[dict[str, Any]] = []
    for parallel, extra in FOUR:
        wanted = job(parallel, **extra)
        if comm.rank > 0:
            weights = SeededWeights(config(), wanted.seed, torch.float64)
            on_rank(wanted, weights, comm, documents=True, dtype=torch.float64)
            results.append({"split": str(parallel)})
            continue
        result = same_as_one(wanted, config(), documents=True, run=lambda on: on(comm))
        results.append({"split": str(parallel), "same": result.same, "said": str(result)})
    return results


def experts_by_node(comm: TorchComm) -> list[str]:
    """What does not equal one process, of tokens that reach experts by node."""
    mixture = config(family="mixtral", num_experts=4, top_k=2, num_layers=2)
    experts = []
    for dispatch in ("1dh", "2dh"):
        split = {"dp": 4, "ep": 4, "expert_dispatch": dispatch, "expert_chunks": [3, 2]}
        split |= {"gradient_slices": [4000, 1000]}
        result = same_as_one(
            job(split, global_batch=4, microbatch=1), mixture, run=lambda on: on(comm)
        )
        if not result.same:
            experts.append(f"{dispatch}: {result}")
    return experts
