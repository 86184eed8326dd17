"""What the workers of claims [13] CO2 and [12] Holmes do: steps over slow links, and training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shoal.claims.experiments.arch_training import Recipe, batch, heldout, text
from shoal.claims.lab.same_as_one import SeededWeights
from shoal.claims.lab.session import RankSession
from shoal.claims.ranks import in_turn
from shoal.parallel.outer.rounds import Rounds
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm

# Share of the steps in which the learning rate rises.
_WARM = 0.1


class CO2Worker:
    """One rank of a job that learns the standard library's bytes, step by step."""

    def __init__(self, comm: Comm, job: TrainJob, config: ModelConfig, total: int) -> None:
        self.session = RankSession(comm, job, config, SeededWeights(config, job.seed))
        self.engine = self.session.engine
        self.recipe = Recipe(steps=total, batch=job.global_batch, length=job.seq_len)
        self.text, self.total, self.done = text(), total, 0

    def step(self) -> None:
        """One training step, as the trainer makes it."""
        both = batch(self.text.train, self.recipe, self.session.job.seed, self.done)
        decayed = 0.525 + 0.475 * math.cos(math.pi * self.done / self.total)
        factor = min(1.0, (self.done + 1) / (_WARM * self.total)) * decayed
        self.session.step(self.session.rows(*both, self.done), factor=factor, total=self.total)
        self.done += 1

    def learned(self) -> float:
        """Held-out loss after all steps, nats a byte."""
        for _ in range(self.total):
            self.step()
        whole = self.engine.whole
        assert whole is not None
        whole.eval()
        with torch.no_grad():
            return heldout(whole, self.text.heldout, self.recipe)

    @property
    def exposed_s(self) -> float:
        """Seconds so far in which it waited for other workers."""
        return sum(h.exposed_s for h in self.engine.hooks if isinstance(h, Rounds))


def time_rounds(
    comm: Comm, *, jobs: Sequence[TrainJob], config: ModelConfig, steps: Sequence[int], turns: int
) -> list[list[list[float]]]:
    """Seconds of a step and the share of it in which this rank waited, by job and turn.

    Each job makes as many steps before those that are timed: what travels of them is under way when
    the clock starts.
    """
    keep_freed_memory()
    workers = [CO2Worker(comm, job, config, 10**5) for job in jobs]  # no step is the last
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


def learn(comm: Comm, *, jobs: Sequence[TrainJob], config: ModelConfig, steps: int) -> list[float]:
    """Train every job from the same weights on the same bytes; held-out loss at the end by job."""
    keep_freed_memory()
    return [CO2Worker(comm, job, config, steps).learned() for job in jobs]


def time_steps(
    comm: Comm, *, job: TrainJob, config: ModelConfig, steps: int
) -> dict[str, list[float]]:
    """Seconds of each training step, and this rank's squared norm of the weights at the end."""
    keep_freed_memory()
    worker = CO2Worker(comm, job, config, steps + 1)
    timed = in_turn(comm, {"seconds": worker.step}, steps)
    owned = worker.engine.sharded.owned()
    norms = [float(owned[name].detach().double().square().sum()) for name in sorted(owned)]
    return {**timed, "norms": norms}
