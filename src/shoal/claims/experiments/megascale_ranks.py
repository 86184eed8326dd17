"""What two ranks with a slow link do for claim [81] MegaScale: steps with gradients that overlap.

Both ways send the same buckets in the same order; only when they leave differs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shoal.claims.lab.measure_passes import batch
from shoal.claims.lab.session import RankSession
from shoal.claims.ranks import in_turn
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm


def overlapped_steps(
    comm: Comm, *, job: TrainJob, config: ModelConfig, pairs: int, ways: dict[str, bool]
) -> dict[str, list[float]]:
    """Seconds of steps whose gradients travel during the backward pass, or after it, in turn.

    Way -> whether they do; ``alone`` of the result are seconds of the passes of ``after``.
    """
    keep_freed_memory()
    engine, rows = RankSession(comm, job, config).engine, batch(job, config.vocab_size)
    alone: dict[str, list[float]] = {way: [] for way in ways}

    def step(way: str) -> None:
        begin = time.perf_counter()
        engine.backward(rows, job.microbatch or len(rows.inputs), rows.targets.numel())
        alone[way].append(time.perf_counter() - begin)
        engine.finish()

    def ready(way: str) -> None:
        engine.sharded.overlap = ways[way]

    arms = {way: lambda way=way: step(way) for way in ways}
    return {**in_turn(comm, arms, pairs, ready=ready), "alone": alone["after"][-pairs:]}
