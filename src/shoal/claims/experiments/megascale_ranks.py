"""What two ranks with a slow link do for claim [81] MegaScale: steps with gradients that overlap.

Both ways send the same buckets in the same order; only when they leave differs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.ir import TrainJob
from shoal.parallel.legal import check_split
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.parallel.comm.collectives import TorchComm

__all__ = ["overlapped_steps"]

_WARMUP = 1


def overlapped_steps(
    comm: TorchComm,
    *,
    job: Mapping[str, Any],
    config: Mapping[str, Any],
    pairs: int,
    overlapped: bool,
) -> dict[str, list[float]]:
    """Seconds of steps whose gradients travel during the backward pass, and after it, in turn.

    Args:
        comm: two ranks.
        job: data-parallel, replicated.
        config: the model.
        pairs: steps of each way.
        overlapped: False puts the other way in its place.
    """
    from shoal.claims.lab.measure_passes import PlaceholderWeights, batch
    from shoal.model.config import ModelConfig
    from shoal.parallel.engine import ParallelEngine

    keep_freed_memory()
    model = ModelConfig.model_validate(config)
    named = TrainJob.model_validate(job)
    engine = ParallelEngine(
        named, check_split(named, model.shape()), PlaceholderWeights(model), comm
    )
    rows = batch(named, model.vocab_size)
    size = named.microbatch or len(rows.inputs)
    overlapped_steps: dict[str, list[float]] = {"during": [], "after": [], "alone": []}
    for turn in range(-_WARMUP, pairs):
        # Every other round backwards, so that drift favours none.
        for way in ("during", "after")[:: 1 if turn % 2 else -1]:
            engine.sharded.overlap = overlapped and way == "during"
            comm.barrier()
            begin = time.perf_counter()
            engine.backward(rows, size, rows.targets.numel())
            computed = time.perf_counter()
            engine.finish()
            comm.barrier()
            if turn >= 0:
                overlapped_steps[way].append(time.perf_counter() - begin)
                if way == "after":
                    overlapped_steps["alone"].append(computed - begin)
    return overlapped_steps
