"""What a rank of the claim of Holmes does: training steps, timed, of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.claims.experiments.co2_ranks import CO2Worker
from shoal.claims.ranks import in_turn
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm

__all__ = ["time_steps"]


def time_steps(
    comm: Comm, *, job: TrainJob, config: ModelConfig, steps: int
) -> dict[str, list[float]]:
    """Time training steps on this rank, after one that is not timed.

    Args:
        comm: all ranks.
        job: what is trained.
        config: the model.
        steps: timed steps.

    Returns:
        Seconds of each step, and this rank's squared norm of the weights at the end: equal where
        the same rows were learnt in the same order.
    """
    keep_freed_memory()
    worker = CO2Worker(comm, job, config, steps + 1)
    timed = in_turn(comm, {"seconds": worker.step}, steps)
    owned = worker.engine.sharded.owned()
    norms = [float(owned[name].detach().double().square().sum()) for name in sorted(owned)]
    return {**timed, "norms": norms}
