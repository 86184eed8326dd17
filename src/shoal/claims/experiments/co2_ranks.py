"""What the workers of claim [13] CO2 do: rounds over a slow link, and training to the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.claims.experiments.arch_training import Recipe, batch, heldout, text
from shoal.claims.lab.same_as_one import SeededWeights
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.ir.hooks import TrainStep
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.outer.rounds import Rounds
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm
    from shoal.train.protocols import Updater

__all__ = ["CO2Worker", "learn", "time_rounds"]

# Share of the steps in which the learning rate rises.
_WARM = 0.1


class CO2Worker:
    """One rank of a job whose steps are made one by one.

    Args:
        comm: all ranks.
        job: what is trained; its batch is that of all ranks.
        config: the model.
        data: bytes that it learns.
        total: steps of the run.
    """

    def __init__(
        self, comm: Comm, job: TrainJob, config: ModelConfig, data: np.ndarray, total: int
    ) -> None:
        self.engine = ParallelEngine(
            job, check_split(job, config.shape()), SeededWeights(config, job.seed), comm
        )
        optimizer = table("optimizer").build(job.optimizer)
        self.updater: Updater = optimizer.build(self.engine.sharded.owned())
        self.recipe = Recipe(steps=total, batch=job.global_batch, length=job.seq_len)
        self.data, self.total, self.done = data, total, 0

    def step(self) -> None:
        """One training step, as the trainer makes it."""
        engine, job = self.engine, self.engine.job
        inputs, targets = batch(self.data, self.recipe, job.seed, self.done)
        share = len(inputs) // engine.replicas
        own = slice(engine.replica * share, (engine.replica + 1) * share)
        rows = ReplicaSequences(inputs[own], targets[own], None, own.start, self.done)
        tokens = job.global_batch * job.seq_len // engine.workers
        loss = engine.backward(rows, job.microbatch or share, tokens)
        engine.finish()
        norm = engine.grad_norm()
        engine.sharded.scale_gradients((job.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        decayed = 0.525 + 0.475 * math.cos(math.pi * self.done / self.total)
        self.updater.step(min(1.0, (self.done + 1) / (_WARM * self.total)) * decayed)
        engine.publish(TrainStep(self.done, self.total, loss=float(loss) / tokens))
        self.done += 1

    @property
    def exposed_s(self) -> float:
        """Seconds so far in which it waited for other workers."""
        return sum(h.exposed_s for h in self.engine.hooks if isinstance(h, Rounds))


def time_rounds(
    comm: Comm,
    *,
    jobs: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    steps: Sequence[int],
    turns: int,
) -> list[list[list[float]]]:
    """Time some steps of every job in turn, on this rank.

    Args:
        comm: all ranks.
        jobs: what to time.
        config: the model.
        steps: of each job that are timed in a row, after as many that are not: what travels of
            those is still under way when the clock starts.
        turns: how often all jobs are gone through, forward and backward in turn.

    Returns:
        By job and turn, seconds of a step and the share of it in which the rank waited.
    """
    keep_freed_memory()
    model = ModelConfig.model_validate(config)
    data = text().train
    total = 10**5  # no step is the last
    workers = [CO2Worker(comm, TrainJob.model_validate(job), model, data, total) for job in jobs]
    times: list[list[list[float]]] = [[] for _ in jobs]
    for turn in range(turns):
        for at in list(range(len(jobs)))[:: -1 if turn % 2 else 1]:
            worker = workers[at]
            for _ in range(steps[at]):
                worker.step()
            comm.barrier()
            begin, waited = time.perf_counter(), worker.exposed_s
            for _ in range(steps[at]):
                worker.step()
            seconds = time.perf_counter() - begin
            times[at].append([seconds / steps[at], (worker.exposed_s - waited) / seconds])
            for hook in worker.engine.hooks:
                hook.state()  # the next job finds an idle link
            comm.barrier()
    return times


def learn(
    comm: Comm, *, jobs: Sequence[Mapping[str, Any]], config: Mapping[str, Any], steps: int
) -> list[float]:
    """Train every job from the same weights on the same bytes.

    Args:
        comm: all ranks.
        jobs: what is trained.
        config: the model.
        steps: of each.

    Returns:
        Held-out loss at the end by job, nats a byte.
    """
    keep_freed_memory()
    model = ModelConfig.model_validate(config)
    known = text()
    results = []
    for job in jobs:
        worker = CO2Worker(comm, TrainJob.model_validate(job), model, known.train, steps)
        for _ in range(steps):
            worker.step()
        whole = worker.engine.whole
        assert whole is not None
        whole.eval()
        with torch.no_grad():
            results.append(heldout(whole, known.heldout, worker.recipe))
    return results
