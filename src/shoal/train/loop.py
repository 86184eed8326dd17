"""The training step.

One step, on every rank: read the rows of this rank's replica; forward and backward by
micro-batch, each loss divided by the *global* count of counted tokens; gradients are
summed over the ranks; clip by the global norm; update; publish. Nothing here depends on
which rank does what (:mod:`shoal.parallel.engine` knows): the batch, the initial weights
and every random number are functions of the seed and the step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.loading import LoadReport
from shoal.checkpoint.pieces import Piece
from shoal.core.errors import NonFiniteError
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.machine import host
from shoal.parallel.engine import Engine
from shoal.parallel.legal import check_split
from shoal.parallel.pipeline.actor import prefetch
from shoal.parallel.tensor.rows import Rows
from shoal.train import masking
from shoal.train.finite import bad_gradients, bad_loss
from shoal.train.optimizers.torch_state import TorchUpdater
from shoal.train.peft.arenas import Arenas
from shoal.train.peft.job import FineTuned
from shoal.train.peft.run.mezo import ZerothOrder
from shoal.train.protocols import UpdatesEarly
from shoal.train.state import Stored, fill, held_by
from shoal.train.watch.selfcheck import check_arithmetic
from shoal.train.watch.watched import phase

if TYPE_CHECKING:
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import Machine, TrainJob
    from shoal.ir.comm import Comm
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.expert.balance import Balance
    from shoal.parallel.expert.lent import Told
    from shoal.parallel.expert.resharding import Reshuffled
    from shoal.parallel.tensor.rows import Weights
    from shoal.train.protocols import LrSchedule, Updater
    from shoal.train.watch.recorder import Recorder

__all__ = ["StepResult", "Trainer"]

IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        loss: mean loss over the counted tokens of the global batch, nats; of this rank's worker's
            share of it, where workers agree once a round.
        grad_norm: global gradient norm before clipping, of the same.
        lr: learning rate used.
        tokens: tokens of the global batch.
        seconds: wall time on this rank.
        stop: some rank asked to stop; workers with rounds know it at the end of one.
        round_loss: mean loss of all workers, where this step brought the news of a round.
        outer_exposed_s: seconds in which this rank waited for other workers.
        balance: how evenly experts were chosen; None in a dense model.
        moved: experts that got other owners; None where no owners were chosen.
        lent: what copies of experts cost this rank; None where none are made.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    stop: bool
    round_loss: float | None = None
    outer_exposed_s: float = 0.0
    balance: Balance | None = None
    moved: Reshuffled | None = None
    lent: Told | None = None


class NoUpdate:
    """The optimizer of a model whose fine-tuning method has none."""

    def step(self, factor: float) -> None:
        """Nothing."""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Nothing."""
        return {}

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Nothing."""


class Trainer:
    """A model, its data and its optimizer, on one rank.

    Args:
        job: the job with every choice made.
        total_steps: steps of the whole run.
        weights: what the model starts from.
        tokens: the prepared corpus.
        comm: all ranks.
        device: where this rank computes.
        place: directory for what an offloaded run keeps on disk.
        machine: that it runs on, by whose rates sequences are dealt out and copies of experts made.

    Raises:
        PlanError: the job's split cannot run.
    """

    def __init__(
        self,
        job: TrainJob,
        total_steps: int,
        weights: Weights,
        tokens: TokenSet,
        comm: TorchComm,
        *,
        device: torch.device | str = "cpu",
        place: Path | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.job = job
        self.total_steps = total_steps
        self.comm = comm
        self.recorder: Recorder | None = getattr(comm, "recorder", None)
        self.tokens = tokens
        self.device = torch.device(device)
        self.packing = table("packing").build(job.packing)
        self.schedule: LrSchedule = table("lr_schedule").build(job.lr_schedule)
        optimizer = table("optimizer").build(job.optimizer)
        self.peak_lr: float = optimizer.lr
        shape = weights.config.shape()
        self.tuned = None if job.finetune is None else FineTuned(weights, job)
        schedule = check_split(job, shape)
        cost = None
        if machine is not None and job.batching is not None:
            cost = SequenceCost.on(shape, machine, job.parallel, precision=job.precision)
        self.engine = Engine(
            job,
            schedule,
            self.tuned or weights,
            comm,
            device=device,
            place=place,
            cost=cost,
            machine=machine,
        )
        self.before_update: Callable[[], None] = lambda: None
        self.before_group: Callable[[Collection[str]], None] | None = None
        """Called with names as they are saved before these tensors change, where the update is
        made in groups; without it ``before_update`` comes first."""
        self.handle = None if self.tuned is None else self.tuned.handle
        self._arenas: Arenas | None = None
        if self.handle is not None:
            self._arenas = Arenas(self.engine.local, self.handle)
        self.arena_bytes: dict[str, int] = {}
        """Of fine-tuning, after its first step: arena -> bytes."""
        if self.handle is not None and self.handle.penalty() is not None:
            # What is added to the loss gives gradients after the last backward pass.
            self.engine.sharded.overlap = False
        self.updater: Updater
        if self.engine.offloaded is not None:
            self.updater = self.engine.offloaded
        else:
            owned = self.engine.sharded.owned()
            self.updater = optimizer.build(owned) if owned else NoUpdate()
        # The ranks that make an update together, and what their optimizer state is saved as.
        self._peers: Comm = self.engine.ranks.worker or comm
        self._prefix = ""
        if self.engine.ranks.outer is not None and self.engine.ranks.outer.rank:
            self._prefix = f"worker{self.engine.ranks.outer.rank}."
        self.microbatch = job.microbatch or job.global_batch // job.parallel.dp
        self._mark = None if job.learn_after is None else masking.mark_of(job.learn_after, tokens)
        self.after_backward: Callable[[], None] | None = None
        """Called in every step after the backward pass, before the first thing that all ranks do
        together: when a rank updates its state, all ranks have returned from it."""
        # The rows of the next step are read, and dealt out, while this one computes.
        self._source = prefetch(self._ahead, 0)

    def step(self, step: int, *, stop: bool = False, record: bool = False) -> StepResult:
        """Do global step ``step``; ``stop`` asks all ranks to stop after it.

        With ``record`` the engine's runtime keeps the times of its passes.

        Raises:
            RankError: a peer is gone.
            NonFiniteError: the loss or a gradient is not; nothing is updated.
        """
        begin = time.perf_counter()
        if self.comm.beat is not None:
            self.comm.beat.step(step)
        if self.recorder is not None:
            self.recorder.step = step
            every = self.job.watch.check_every
            if every and step % every == every - 1:
                check_arithmetic(str(self.device), seed=step)
        with phase(self.comm, "load"):
            rows = self._source.get(step)
        count = self._global_count(rows)
        engine = self.engine
        if isinstance(self.handle, ZerothOrder):
            return self._without_gradients(step, rows, count, stop=stop, begin=begin)
        if self.handle is not None:
            if self.handle.looks and step == 0:
                self.handle.look(
                    self._look_at, lambda x: self.comm.all_reduce(x, tag="look").wait()
                )
            self.handle.before_step(step, self.total_steps)
        factor = self.schedule.factor(step, self.total_steps)
        if isinstance(self.updater, UpdatesEarly):
            self.updater.begin(factor, self.before_update)
        with self._counted():
            loss_sum = engine.backward(rows, self.microbatch, count, record=record)
        if self.handle is not None:
            self._penalise()
        if self.after_backward is not None:
            self.after_backward()
        # One small reduction carries the loss and the wish to stop.
        shared = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
        pending = self._peers.all_reduce(shared, tag="loss")
        engine.finish()
        if self.handle is not None:
            self.handle.before_update(step, self.total_steps)
        norm = engine.grad_norm()
        pending.wait()
        total, stops = shared.tolist()
        loss = total / count
        self._require_finite(
            step,
            "the loss is",
            loss,
            lambda: bad_loss(engine, self.updater, self._peers, loss_sum),
        )
        # The norm is of the gradients of all ranks: one of them that is not finite makes it so.
        self._require_finite(
            step,
            "the norm of the gradients is",
            float(norm),
            lambda: bad_gradients(engine, self._peers),
        )
        if self.job.grad_clip:
            engine.sharded.scale_gradients((self.job.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        self._update(factor)
        with phase(self.comm, "update"):
            if self.handle is not None:
                self.handle.after_update(step, self.total_steps)
        exposed_s, round_loss = 0.0, None
        if engine.outer is not None:
            exposed_s = -engine.outer.exposed_s
            engine.outer.after_update(
                step, loss=loss, stop=stops > 0, last=step + 1 == self.total_steps
            )
            exposed_s += engine.outer.exposed_s
            round_loss = engine.outer.loss
            stops = float(engine.outer.settled and engine.outer.stop)
        with phase(self.comm, "update"):
            moved = engine.reshard(step, self.updater.state)
        engine.sharded.publish()
        engine.routers.settle()
        self._count_arenas()
        return StepResult(
            loss=loss,
            grad_norm=float(norm),
            lr=self.peak_lr * factor,
            tokens=self.job.global_batch * self.job.seq_len,
            seconds=time.perf_counter() - begin,
            stop=stops > 0,
            round_loss=round_loss,
            outer_exposed_s=exposed_s,
            balance=engine.routers.balance,
            moved=moved,
            lent=None if engine.lent is None else engine.lent.told(),
        )

    def _require_finite(self, step: int, what: str, value: float, where: Callable[[], str]) -> None:
        """Refuse a number that all ranks have; ``where`` looks, on all of them, for its origin."""
        if not math.isfinite(value):
            found = where()
            detail = f"; not finite: {found}" if found else ""
            raise NonFiniteError(
                f"step {step}: {what} {value}{detail}; lower optimizer.lr "
                f"(now {self.peak_lr:g}) or use precision: fp32, and continue with --resume"
            )

    @property
    def settled(self) -> bool:
        """All workers have the same parameters: after every step, or at a round's start."""
        return self.engine.outer is None or self.engine.outer.settled

    def _update(self, factor: float) -> None:
        """Update what this rank owns; what is still being saved is waited for, group by group."""
        before = self.before_group
        if before is None or not isinstance(self.updater, TorchUpdater):
            self.before_update()
            with phase(self.comm, "update"):
                self.updater.step(factor)
            return
        state = self.updater.state()

        def ready(names: Collection[str]) -> None:
            changing = []
            for name in names:
                saved = self.engine.saved_as(name)
                kept = state.get(name, {})
                states = (f"{self._prefix}optimizer.{saved}.{key}" for key in kept)
                changing += [f"model.{saved}", *states]
            before(changing)

        with phase(self.comm, "update"):
            self.updater.step(factor, ready)
        self.before_update()  # publishing changes what is not owned here

    def _look_at(self, step: int) -> None:
        """Gradients of a batch, which nobody steps by."""
        rows = self._rows(step)
        self.engine.backward(rows, self.microbatch, self._global_count(rows))
        self.engine.finish()

    def _without_gradients(
        self, step: int, rows: Rows, count: float, *, stop: bool, begin: float
    ) -> StepResult:
        """A step of a method that needs forward passes alone."""
        assert isinstance(self.handle, ZerothOrder)
        shared = torch.zeros(2, dtype=torch.float64, device=self.device)

        def loss() -> float:
            shared.zero_()
            for at in range(0, len(rows.inputs), self.microbatch):
                part = slice(at, at + self.microbatch)
                shared[0] += self.engine.loss_sum(rows.inputs[part], rows.targets[part])
            shared[1] = float(stop)
            self.comm.all_reduce(shared, tag="loss").wait()
            return float(shared[0]) / count

        lr = self.peak_lr * self.schedule.factor(step, self.total_steps)
        with self._counted(), phase(self.comm, "forward"):
            value, slope = self.handle.estimate(step, loss, lr)
        self._require_finite(
            step, "the loss is", value, lambda: bad_loss(self.engine, self.updater, self.comm)
        )
        self._count_arenas()
        return StepResult(
            loss=value,
            grad_norm=abs(slope),
            lr=lr,
            tokens=self.job.global_batch * self.job.seq_len,
            seconds=time.perf_counter() - begin,
            stop=float(shared[1]) > 0,
        )

    def _counted(self) -> contextlib.AbstractContextManager[None]:
        """The first passes of fine-tuning are counted, byte by byte."""
        if self._arenas is None or self.arena_bytes:
            return contextlib.nullcontext()
        return self._arenas.passes()

    def _count_arenas(self) -> None:
        if self._arenas is not None and not self.arena_bytes:
            self.arena_bytes = self._arenas.bytes(self.updater.state())

    def _penalise(self) -> None:
        """Add the gradient of what the fine-tuning method adds to the loss; ranks share it."""
        assert self.handle is not None
        penalty = self.handle.penalty()
        if penalty is not None:
            torch.autograd.backward(penalty / self.comm.world)

    def close(self) -> None:
        """End the threads that read rows and keep what passes save, and give back the places."""
        self._source.close()
        if self.engine.saved is not None:
            self.engine.saved.close()
        if self.engine.offloaded is not None:
            self.engine.offloaded.close()
        if self.engine.hybrid is not None:
            self.engine.hybrid.close()

    def _ahead(self, step: int) -> Rows:
        """The rows of a step; on the first rank with the plan that all of them will go by."""
        rows = self._rows(step)
        hybrid = self.engine.hybrid
        if hybrid is None or self.comm.rank:
            return rows
        return rows._replace(plan=hybrid.planned(rows))

    def _rows(self, step: int) -> Rows:
        """The rows that this rank is given: of its replica, or all."""
        from shoal.corpora.order import batch

        job, engine = self.job, self.engine
        replica, replicas = engine.reads
        found = batch(
            self.tokens.train,
            self.packing,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            seed=job.seed,
            step=step,
            rank=replica,
            world=replicas,
        )
        tokens = torch.from_numpy(found.tokens).to(self.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        first = replica * job.global_batch // replicas
        given = None if self._mark is None else masking.given(tokens, self._mark)
        mask_id = engine.config.mask_token_id
        if mask_id is not None:
            hidden = masking.masked(
                inputs,
                mask_id,
                seed=job.seed,
                step=step,
                first=first,
                total=job.global_batch,
                kept_bT=None if given is None else given[:, :-1],
            )
            documents = None
            if found.documents is not None:
                documents = torch.from_numpy(found.documents[:, :-1]).to(self.device)
            count = inputs.numel() if given is None else int((~given[:, :-1]).sum())
            return Rows(
                hidden.inputs, hidden.targets, documents, first, step, hidden.weights, count
            )
        if given is not None:
            targets = targets.masked_fill(given[:, 1:], IGNORED)
            count = int((targets != IGNORED).sum())
            return Rows(inputs, targets, None, first, step, counted=count)
        if found.documents is None:
            return Rows(inputs, targets, None, first, step)
        documents = torch.from_numpy(found.documents).to(self.device, non_blocking=True)
        crossing = documents[:, 1:] != documents[:, :-1]
        return Rows(inputs, targets.masked_fill(crossing, IGNORED), documents[:, :-1], first, step)

    def _global_count(self, rows: Rows) -> float:
        if rows.documents is None and rows.counted is None:
            return float(self.job.global_batch // self.engine.workers * self.job.seq_len)
        if rows.counted is not None:
            counted = torch.tensor(float(rows.counted), device=self.device)
        else:
            counted = (rows.targets != IGNORED).sum().to(torch.float32)
        if self.engine.hybrid is not None:  # every rank has all rows
            return max(1.0, float(counted))
        # Every rank of a replica has all of its rows; one of them counts.
        if not self.engine.first_of_replica:
            counted.zero_()
        self._peers.all_reduce(counted, tag="count").wait()
        return max(1.0, float(counted))

    def pieces(self) -> dict[str, list[Piece]]:
        """What this rank holds of a checkpoint: weights and optimizer state, by name.

        Workers with rounds save at a round's start; each has an optimizer state of its own.
        """
        found = held_by(self.engine, self.updater)
        if self._prefix:
            found = {
                f"{self._prefix}{name}" if name.startswith("optimizer.") else name: pieces
                for name, pieces in found.items()
            }
        if self.engine.outer is not None:
            for name, value in self.engine.outer.state().items():
                found[self._outer_name(name)] = [Piece.whole(value)]
        if self.handle is not None and self.comm.rank == 0:
            for name, value in self.handle.buffers().items():
                # Methods change them before a step as well as in its update.
                found[f"finetune.{name}"] = [replace(Piece.whole(value), volatile=True)]
        return found

    @torch.no_grad()
    def load(self, saved: Stored) -> LoadReport | None:
        """Take over weights and optimizer state, whatever split saved them; all ranks call it.

        Returns:
            What it has cost this rank, where it was a checkpoint of our own.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        report = fill(self.engine, self.updater, saved, self.comm, prefix=self._prefix)
        if self.engine.outer is not None:
            names = set(saved.names())
            kept = self.engine.outer.state()
            self.engine.outer.load(
                {n: saved.tensor(s) for n in kept if (s := self._outer_name(n)) in names}
            )
        if self.handle is not None:
            self.handle.restore(lambda name: saved.tensor(f"finetune.{name}"))
        return report

    def _outer_name(self, name: str) -> str:
        """What a tensor of the rounds is saved as: ranks with one place in all workers share it."""
        ranks, outer = self.engine.ranks, self.engine.outer
        place = f"outer.place{0 if ranks.worker is None else ranks.worker.rank}"
        if outer is not None and outer.divided and ranks.outer is not None:
            place += f".worker{ranks.outer.rank}"
        return f"{place}.{name}"

    def tier_bytes(self) -> dict[str, int]:
        """Most bytes that this rank had in each tier; nothing where nothing is offloaded."""
        return {} if self.engine.offloaded is None else self.engine.offloaded.tiers.peaks()

    def memory_bytes(self) -> int:
        """Peak memory of this rank: of the device on a GPU, else of the process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return host.peak_memory()
