"""The training step.

One step, on every rank: read the rows of this rank's replica; forward and backward by
micro-batch, each loss divided by the *global* count of counted tokens; gradients are
summed over the ranks; clip by the global norm; update; publish. Nothing here depends on
which rank does what (:mod:`shoal.parallel.engine` knows): the batch, the initial weights
and every random number are functions of the seed and the step. What a technique adds to a step is
a hook (:mod:`shoal.ir.hooks` says when each is called, and in which order).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.loading import LoadReport
from shoal.checkpoint.pieces import Piece
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.ir.hooks import StepHook, TensorSource, TrainStep
from shoal.machine import host
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train.batches import BatchSource
from shoal.train.finite import FiniteHook
from shoal.train.optimizers.torch_state import TorchUpdater
from shoal.train.peft.hook import FineTuneHook
from shoal.train.peft.job import FineTuned
from shoal.train.state import fill, held_by, saved_names
from shoal.train.watch.selfcheck import WatchHook
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from shoal.core.hooks import Hooks
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import Machine, TrainJob
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.tensor.rows import WeightSource
    from shoal.train.protocols import LrSchedule, Updater

StepMethod = Callable[[TrainStep, ReplicaSequences], None]
"""Goes from a step's rows to its gradients; sets its ``loss``, ``norm`` and ``stop``."""


@dataclass(frozen=True)
class TrainStepResult:
    """What one step did; :meth:`RankTrainer.events` has what hooks add.

    Args:
        loss: mean loss over the counted tokens of the global batch, nats; of this rank's worker's
            share of it, where workers agree once a round.
        grad_norm: global gradient norm before clipping, of the same.
        lr: learning rate used.
        tokens: tokens of the global batch.
        targets: those of them that the loss is a mean over.
        seconds: wall time on this rank.
        stop: some rank asked to stop; workers with rounds know it at the end of one.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    targets: int
    seconds: float
    stop: bool


class RankTrainer:
    """A model, its data and its optimizer, on one rank.

    Args:
        job: the job with every choice made.
        total_steps: steps of the whole run.
        weights: what the model starts from.
        tokens: the prepared corpus.
        comm: all ranks.
        device: where this rank computes.
        place: directory for what an offloaded run keeps on disk.
        machine: that it runs on, by whose rates sequences are assigned and copies of experts made.

    Attributes:
        hooks: hooks of techniques; more may be added.
        method: computes the gradients of a step from its rows.

    Raises:
        PlanError: the job's split cannot run.
    """

    def __init__(
        self,
        job: TrainJob,
        total_steps: int,
        weights: WeightSource,
        tokens: TokenSet,
        comm: TorchComm,
        *,
        device: torch.device | str = "cpu",
        place: Path | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.job, self.total_steps = job, total_steps
        self.comm, self.tokens = comm, tokens
        self.device = torch.device(device)
        self.schedule: LrSchedule = table("lr_schedule").build(job.lr_schedule)
        optimizer = table("optimizer").build(job.optimizer)
        self.peak_lr: float = optimizer.lr
        shape = weights.config.shape()
        tuned = None if job.finetune is None else FineTuned(weights, job, comm)
        schedule = check_split(job, shape)
        cost = None
        if machine is not None and job.batching is not None:
            cost = SequenceCost.on(shape, machine, job.parallel, precision=job.precision)
        self.engine = ParallelEngine(
            job,
            schedule,
            tuned or weights,
            comm,
            device=device,
            place=place,
            cost=cost,
            machine=machine,
        )
        self.updater: Updater = self.engine.updater(optimizer)
        self.microbatch = job.microbatch or job.global_batch // job.parallel.dp
        self.source = BatchSource(job, tokens, self.engine)
        self.method: StepMethod = self._gradients
        self.hooks: Hooks[StepHook] = self.engine.hooks
        self.hooks.add(WatchHook(comm, job.watch.check_every, str(self.device)))
        self.hooks.add(FiniteHook(self.engine, self.updater, self.peak_lr))
        if tuned is not None:
            self.hooks.add(FineTuneHook(tuned, self))

    def step(self, number: int, *, stop: bool = False, record: bool = False) -> TrainStepResult:
        """Do global step ``number``; ``stop`` asks all ranks to stop after it.

        With ``record`` the engine's runtime keeps the times of its passes.

        Raises:
            RankError: a peer is gone.
            NonFiniteError: the loss or a gradient is not; nothing is updated.
        """
        begin = time.perf_counter()
        factor = self.schedule.factor(number, self.total_steps)
        step = TrainStep(number, self.total_steps, factor, stop=stop, record=record)
        step.state, step.changing = self.updater.state, self._changing
        for hook in self.hooks:
            hook.before_step(step)
        with phase(self.comm, "load"):
            rows = self.source.get(number)
        step.count = self.source.count(rows)
        self.method(step, rows)
        for hook in self.hooks:
            hook.before_update(step)
        if self.job.grad_clip:
            scale = (self.job.grad_clip / (step.norm + 1e-6)).clamp(max=1.0)
            self.engine.sharded.scale_gradients(scale)
        self._update(factor)
        with phase(self.comm, "update"):
            self.engine.publish(step)
        tokens = self.job.global_batch * self.job.seq_len
        seconds = time.perf_counter() - begin
        lr = self.peak_lr * factor
        # Workers with batches of their own count each its own.
        targets = round(step.count * self.engine.workers)
        return TrainStepResult(step.loss, float(step.norm), lr, tokens, targets, seconds, step.stop)

    def _gradients(self, step: TrainStep, rows: ReplicaSequences) -> None:
        """From rows to whole gradients, with loss and norm."""
        with self.engine.around("step"):
            step.own = self.engine.backward(rows, self.microbatch, step.count, record=step.record)
        for hook in self.hooks:
            hook.after_backward(step)
        # One small reduction carries the loss and the wish to stop.
        shared = torch.stack([step.own, torch.full_like(step.own, float(step.stop))])
        pending = self.engine.ranks.peers.all_reduce(shared, tag="loss")
        self.engine.finish()
        for hook in self.hooks:
            hook.after_reduce(step)
        step.norm = self.engine.grad_norm()
        pending.wait()
        total, stops = shared.tolist()
        step.loss, step.stop = total / step.count, stops > 0

    def _update(self, factor: float) -> None:
        """Update what this rank owns; what is still being saved is waited for, group by group."""
        updater = self.updater
        if isinstance(updater, TorchUpdater):
            state = updater.state()
            with phase(self.comm, "update"):
                updater.step(
                    factor, lambda names: self._changing(saved_names(self.engine, state, names))
                )
            self._changing()  # publishing changes what is not owned here
            return
        self._changing()
        with phase(self.comm, "update"):
            updater.step(factor)

    def _changing(self, names: Collection[str] | None = None) -> None:
        for hook in self.hooks:
            hook.changing(names)

    def events(self) -> dict[str, dict[str, Any]]:
        """What hooks report of the last step: event -> its fields; those of ``step`` are one's."""
        events: dict[str, dict[str, Any]] = {"step": {}}
        for hook in self.hooks:
            for kind, fields in hook.events().items():
                events.setdefault(kind, {}).update(fields)
        return events

    @property
    def settled(self) -> bool:
        """All ranks have the same parameters; workers with rounds have them at the end of one."""
        return all(hook.settled for hook in self.hooks)

    def pieces(self) -> dict[str, list[Piece]]:
        """What this rank holds of a checkpoint, by name: weights, optimizer state, hooks' state."""
        pieces = held_by(self.engine, self.updater)
        for hook in self.hooks:
            for name, x in hook.state().items():
                pieces[name] = [replace(Piece.whole(x), volatile=hook.volatile)]
        return pieces

    @torch.no_grad()
    def load(self, saved: TensorSource) -> LoadReport | None:
        """Take over weights, optimizer state and hooks' state; all ranks call it.

        Returns:
            What it has cost this rank, where it was a checkpoint of our own.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        report = fill(self.engine, self.updater, saved, self.comm)
        for hook in self.hooks:
            hook.load(saved)
        return report

    def memory_bytes(self) -> int:
        """Peak memory of this rank: of the device on a GPU, else of the process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return host.peak_memory()

    def close(self) -> None:
        """End what runs beside the steps, and give the places back."""
        self.source.close()
        for hook in reversed(list(self.hooks)):
            hook.close()
