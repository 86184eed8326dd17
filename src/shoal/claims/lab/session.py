"""A training job on one rank, one step at a time: what the ranks of claims run and time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from shoal.claims.lab.measure_passes import PlaceholderWeights
from shoal.core.parts import table
from shoal.ir.hooks import TrainStep
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm
    from shoal.parallel.tensor.rows import WeightSource
    from shoal.train.protocols import Updater


class RankSession:
    """The engine and the optimizer of a job, on one rank; weights in no time, if none are given."""

    def __init__(
        self, comm: Comm, job: TrainJob, config: ModelConfig, weights: WeightSource | None = None
    ) -> None:
        self.job, schedule = job, check_split(job, config.shape())
        self.engine = ParallelEngine(job, schedule, weights or PlaceholderWeights(config), comm)

    @functools.cached_property
    def updater(self) -> Updater:
        """What updates this rank's parameters."""
        return self.engine.updater(table("optimizer").build(self.job.optimizer))

    def rows(self, inputs_BT: Tensor, targets_BT: Tensor, step: int) -> ReplicaSequences:
        """The rows of this rank's replica, of a global batch."""
        share = len(inputs_BT) // self.engine.replicas
        own = slice(self.engine.replica * share, (self.engine.replica + 1) * share)
        return ReplicaSequences(inputs_BT[own], targets_BT[own], None, own.start, step)

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.engine.local.parameters():
            parameter.grad = None

    def passes(
        self, rows: ReplicaSequences, *, count: float | None = None, record: bool = False
    ) -> Tensor:
        """Forward and backward passes and the sums of gradients; this rank's loss, summed.

        Losses are divided by ``count`` tokens; ``record`` keeps the times of passes.
        """
        size, tokens = self.job.microbatch or len(rows.inputs), count or rows.targets.numel()
        loss = self.engine.backward(rows, size, tokens, record=record)
        self.engine.finish()
        return loss

    def step(
        self, rows: ReplicaSequences, *, factor: float = 1.0, total: int = 0, record: bool = False
    ) -> Tensor:
        """A training step as the trainer makes it; this rank's loss, summed over its tokens.

        The learning rate has ``factor``, the run ``total`` steps; ``record`` keeps the times of
        passes.
        """
        count = self.job.global_batch * self.job.seq_len // self.engine.workers
        loss = self.passes(rows, count=count, record=record)
        norm = self.engine.grad_norm()
        self.engine.sharded.scale_gradients((self.job.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        self.updater.step(factor)
        self.engine.publish(TrainStep(rows.step, total, loss=float(loss) / count))
        return loss
