"""The training step.

One step, on every rank: read this rank's rows of the global batch; forward and
backward by micro-batch, each loss divided by the *global* count of counted tokens;
gradients are summed over the ranks while backward runs; clip by the global norm;
update; publish. Nothing here depends on which rank does what: the batch, the
initial weights and every random number are functions of the seed and the step.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.store import Piece, Saved
from shoal.core.errors import ConfigError
from shoal.core.parts import table

if TYPE_CHECKING:
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import TrainJob
    from shoal.model.transformer import Transformer
    from shoal.parallel.comm import TorchComm
    from shoal.parallel.protocols import Sharded
    from shoal.train.protocols import LrSchedule, Updater

__all__ = ["StepResult", "Trainer"]

IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        loss: mean loss over the counted tokens of the global batch, nats.
        grad_norm: global gradient norm before clipping.
        lr: learning rate used.
        tokens: tokens of the global batch.
        seconds: wall time on this rank.
        stop: some rank asked to stop.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    stop: bool


class Trainer:
    """A model, its data and its optimizer, on one rank.

    Args:
        job: the job with every choice made.
        total_steps: steps of the whole run.
        model: the model, initialised.
        tokens: the prepared corpus.
        comm: the data-parallel ranks.
    """

    def __init__(
        self,
        job: TrainJob,
        total_steps: int,
        model: Transformer,
        tokens: TokenSet,
        comm: TorchComm,
    ) -> None:
        self.job = job
        self.total_steps = total_steps
        self.comm = comm
        self.tokens = tokens
        self.device = next(model.parameters()).device
        self.packing = table("packing").build(job.packing)
        self.schedule: LrSchedule = table("lr_schedule").build(job.lr_schedule)
        optimizer = table("optimizer").build(job.optimizer)
        shard = table("shard").build(job.shard)
        self.peak_lr: float = optimizer.lr
        self.sharded: Sharded = shard.apply(model, comm, whole_matrices=optimizer.whole_matrices)
        # A forward pass of a sharded model is itself collective: all ranks make the same ones.
        self.gathers = bool(shard.divides & {"gradients", "weights"})
        self.model = model
        self.updater: Updater = optimizer.build(self.sharded.owned())
        self.loss_sum = torch.compile(model.loss_sum) if job.compile else model.loss_sum
        rows = job.global_batch // job.parallel.dp
        self.microbatch = job.microbatch or rows

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Compute in bf16 if the job says so; weights and updates stay fp32."""
        if self.job.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def step(self, step: int, *, stop: bool = False) -> StepResult:
        """Do global step ``step``; ``stop`` asks all ranks to stop after it.

        Raises:
            RankError: a peer is gone.
            ConfigError: the loss is not finite.
        """
        begin = time.perf_counter()
        if self.comm.beat is not None:
            self.comm.beat.step(step)
        inputs, targets, documents = self._batch(step)
        count = self._global_count(targets, documents)
        loss_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        chunks = range(0, len(inputs), self.microbatch)
        for start in chunks:
            rows = slice(start, start + self.microbatch)
            last = start + self.microbatch >= len(inputs)
            with self.sharded.accumulate(last=last):
                with self.autocast():
                    part = self.loss_sum(
                        inputs[rows],
                        targets[rows],
                        documents_BT=None if documents is None else documents[rows],
                        recompute=self.job.recompute == "full",
                    )
                (part / count).backward()  # type: ignore[no-untyped-call]
                loss_sum += part.detach()
        # One small reduction carries the loss and the wish to stop.
        shared = torch.stack([loss_sum, torch.full_like(loss_sum, float(stop))])
        pending = self.comm.all_reduce(shared, tag="loss")
        self.sharded.finish()
        norm = self.sharded.grad_norm()
        if self.job.grad_clip:
            self.sharded.scale_gradients((self.job.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        factor = self.schedule.factor(step, self.total_steps)
        pending.wait()
        total, stops = shared.tolist()
        loss = total / count
        if not loss == loss or loss in (float("inf"), float("-inf")):
            raise ConfigError(
                f"step {step}: the loss is {loss}; lower optimizer.lr "
                f"(now {self.peak_lr:g}) or use precision: fp32"
            )
        self.updater.step(factor)
        self.sharded.publish()
        return StepResult(
            loss=loss,
            grad_norm=float(norm),
            lr=self.peak_lr * factor,
            tokens=self.job.global_batch * self.job.seq_len,
            seconds=time.perf_counter() - begin,
            stop=stops > 0,
        )

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Inputs [b, T], targets [b, T] and documents [b, T] of this rank."""
        from shoal.corpora.order import batch

        job = self.job
        found = batch(
            self.tokens.train,
            self.packing,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            seed=job.seed,
            step=step,
            rank=self.comm.rank,
            world=self.comm.world,
        )
        tokens = torch.from_numpy(found.tokens).to(self.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if found.documents is None:
            return inputs, targets, None
        documents = torch.from_numpy(found.documents).to(self.device, non_blocking=True)
        crossing = documents[:, 1:] != documents[:, :-1]
        return inputs, targets.masked_fill(crossing, IGNORED), documents[:, :-1]

    def _global_count(self, targets: torch.Tensor, documents: torch.Tensor | None) -> float:
        if documents is None:
            return float(self.job.global_batch * self.job.seq_len)
        count = (targets != IGNORED).sum().to(torch.float32)
        self.comm.all_reduce(count, tag="count").wait()
        return max(1.0, float(count))

    def pieces(self) -> dict[str, Piece]:
        """What this rank writes into a checkpoint: weights and optimizer state, by name."""
        held = self.sharded.held()
        found: dict[str, Piece] = {}
        for name, (tensor, offset, shape) in held.items():
            if self.sharded.writes(name):
                found[f"model.{name}"] = Piece(tensor, shape, offset)
        for name, entries in self.updater.state().items():
            if self.sharded.writes(name):
                _, offset, shape = held[name]
                for key, value in entries.items():
                    whole = value.dim() == 0
                    found[f"optimizer.{name}.{key}"] = Piece(
                        value, () if whole else shape, () if whole else offset
                    )
        return found

    @torch.no_grad()
    def load(self, saved: Saved) -> None:
        """Take over weights and optimizer state, whatever number of ranks saved them.

        Raises:
            CheckpointError: something is missing or damaged.
        """
        held = self.sharded.held()
        for name, (tensor, offset, shape) in held.items():
            tensor.copy_(_box(saved, f"model.{name}", tensor, offset, shape))
        keys: dict[str, list[str]] = {}
        for entry in saved.names():
            if entry.startswith("optimizer."):
                name, _, key = entry.removeprefix("optimizer.").rpartition(".")
                keys.setdefault(name, []).append(key)
        state: dict[str, Mapping[str, torch.Tensor]] = {}
        for name in self.sharded.owned():
            tensor, offset, shape = held[name]
            state[name] = {
                key: _box(saved, f"optimizer.{name}.{key}", tensor, offset, shape)
                for key in keys.get(name, [])
            }
            if not state[name]:
                del state[name]
        self.updater.load(state)

    def memory_bytes(self) -> int:
        """Peak memory of this rank: of the device on a GPU, else of the process."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _box(
    saved: Saved,
    name: str,
    like: torch.Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
) -> torch.Tensor:
    if saved.shape(name) == ():
        return saved.tensor(name)
    return saved.tensor(name, offset=offset, shape=tuple(like.shape))
