"""Training over one emulated disk, with the optimizer after the backward pass or during it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.lab.measure_passes import PlaceholderWeights
from shoal.core.random import generator
from shoal.ir import Work
from shoal.machine.described import load
from shoal.memory.fuyou.build import FuyouAssignment, fuyou_model
from shoal.memory.fuyou.model import FuyouModel
from shoal.memory.fuyou.needs import predicted
from shoal.memory.fuyou.part import Fuyou
from shoal.memory.streaming.build import TierAssignment, offloaded
from shoal.memory.tiers.shared import SharedLink
from shoal.model.config import ModelConfig
from shoal.model.initialise import empty
from shoal.train.optimizers.adamw import AdamW

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.memory.streaming.offloaded import OffloadedModel

VOCAB = 256
_LR = 1e-3
_PIECES: dict[str, Any] = {"sub_group_numel": 2**19, "prefetch_numel": 10**7}


@dataclass(frozen=True)
class Regime:
    """Model, tokens of a step, budgets, byte/s that the disk reads and writes (None: its own)."""

    config: ModelConfig
    tokens: int
    device_bytes: int
    host_bytes: int
    disk_rate: float | None
    place: Path
    seed: int

    def links(self) -> tuple[SharedLink | None, SharedLink | None]:
        """Of a disk that is no faster than its set rate, for all processes together."""
        rate = self.disk_rate
        return (None, None) if rate is None else (SharedLink(rate), SharedLink(rate))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        source = generator(self.seed, purpose="fuyou", step=step)
        whole = torch.from_numpy(source.integers(0, VOCAB, (1, self.tokens + 1)))
        return whole[:, :-1].clone(), whole[:, 1:].clone()

    def predicted_bytes(self) -> dict[str, float]:
        """Bytes by tier that Fuyou says beforehand."""
        part = Fuyou(device_budget=self.device_bytes, host_budget=self.host_bytes, **_PIECES)
        job = train_job(seq_len=self.tokens, global_batch=1, microbatch=1, grad_clip=0, steps=1)
        work = Work(shape=self.config.shape(), job=job)
        return predicted(part, work, load("laptop")).estimate.memory_bytes


def wide_lm(hidden: int, layers: int, tokens: int) -> ModelConfig:
    """A byte-level decoder; of four layers and 1,024 wide it has 50 million parameters."""
    ffn = hidden * 8 // 3 // 64 * 64
    return llama(hidden, layers, hidden // 64, ffn=ffn, length=tokens)


class FuyouTraining:
    """A model in training under one policy; to be closed."""

    def __init__(
        self, regime: Regime, comm: Comm, policy: Literal["zero_infinity", "fuyou"]
    ) -> None:
        self.regime = regime
        self.made: OffloadedModel
        rule, values = AdamW(lr=_LR, fused=False), PlaceholderWeights(regime.config).whole
        model = empty(regime.config)
        shared: dict[str, Any] = {
            **_PIECES, "device_bytes": regime.device_bytes, "path": regime.place,
            "disk_links": regime.links(),
        }  # fmt: skip
        if policy == "fuyou":
            wanted = FuyouAssignment(
                **shared, host_bytes=regime.host_bytes, swap="auto", swap_bytes=2**30
            )
            self.made = fuyou_model(model, comm, rule, wanted, device="cpu", values=values)
        else:
            # The host has all the room it asks for: how much is the question.
            after = TierAssignment(
                **shared, host_bytes=2**40, param="disk", optim="disk", act="host", owner=False
            )
            self.made = offloaded(model, comm, rule, after, values=values)
        self.step = 0
        self.losses: list[float] = []

    @property
    def fuyou(self) -> FuyouModel:
        """The model, which is Fuyou's."""
        assert isinstance(self.made, FuyouModel)
        return self.made

    def run(self, steps: int) -> float:
        """Seconds of a step, of so many, until all that they update is on the disk."""
        made, regime = self.made, self.regime
        begin = time.perf_counter()
        for _ in range(steps):
            x, y = regime.batch(self.step)
            self.step += 1
            if isinstance(made, FuyouModel):
                made.begin(1.0)
            with made.passes("train", x, y):
                loss = made.model.loss_sum(x, y) / regime.tokens  # type: ignore[operator]
                loss.backward()
                self.losses.append(float(loss.detach()))
                del loss
            made.step(1.0)
        if isinstance(made, FuyouModel):
            made.stream.consumer.drain()
        return (time.perf_counter() - begin) / steps

    def close(self) -> None:
        """End it."""
        self.made.close()


def resident(regime: Regime, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of PyTorch with everything in memory."""
    model, weights = empty(regime.config), PlaceholderWeights(regime.config)
    for name in [name for name, _ in model.named_parameters()]:
        owner, _, leaf = name.rpartition(".")
        whole = torch.nn.Parameter(weights.whole(name).clone())
        setattr(model.get_submodule(owner), leaf, whole)
    updater = AdamW(lr=_LR, fused=False).build(dict(model.named_parameters()))
    losses = []
    for step in range(steps):
        x, y = regime.batch(step)
        loss = model.loss_sum(x, y) / regime.tokens
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        updater.step(1.0)
        for parameter in model.parameters():
            parameter.grad = None
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def differing(regime: Regime, training: FuyouTraining, steps: int) -> int:
    """Losses and numbers of parameters that are not those of PyTorch after so many steps."""
    losses, expected = resident(regime, steps)
    training.run(steps)
    held = training.made.held()
    differ = sum(a != b for a, b in zip(losses, training.losses, strict=True))
    return differ + sum(int((held[name].tensor != x).sum()) for name, x in expected.items())
