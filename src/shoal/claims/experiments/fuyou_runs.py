"""Training runs over one emulated disk: with the optimizer after the backward pass, or in it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.memory.build import Wanted, offloaded
from shoal.memory.fuyou_model import FuyouModel, WantedSwap, fuyou_model
from shoal.memory.shared import SharedLink
from shoal.model.config import ModelConfig
from shoal.model.initialise import empty
from shoal.parallel.measure_passes import Cheap
from shoal.parallel.thread_comm import run_ranks
from shoal.train.optimizers.adamw import AdamW

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.memory.offloaded import OffloadedModel
    from shoal.plan.swap import Iteration, Swappable, Times

__all__ = ["Ran", "Regime", "fuyou", "resident", "wide_lm", "zero_infinity"]

VOCAB = 256
_LR = 1e-3


@dataclass(frozen=True)
class Regime:
    """What all policies have in common.

    Args:
        config: of the model.
        tokens: of a step.
        device_bytes: budget of the device.
        host_bytes: budget of the host.
        disk_rate: bytes per second that the disk reads, and that it writes.
        place: directory of its file.
        seed: of the tokens.
    """

    config: ModelConfig
    tokens: int
    device_bytes: int
    host_bytes: int
    disk_rate: float | None
    place: Path
    seed: int

    def links(self) -> tuple[SharedLink | None, SharedLink | None]:
        """Of a disk that is no faster than it is told to be, for all processes together."""
        rate = self.disk_rate
        return (None, None) if rate is None else (SharedLink(rate), SharedLink(rate))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        source = generator(self.seed, purpose="fuyou", step=step)
        whole = torch.from_numpy(source.integers(0, VOCAB, (1, self.tokens + 1)))
        return whole[:, :-1].clone(), whole[:, 1:].clone()


@dataclass(frozen=True)
class Ran:
    """What a run came to.

    Args:
        losses: of every step.
        values: of every parameter afterwards; none where nobody compares them.
        peaks: tier -> most bytes.
        step_s: mean seconds of the steps that count, updates waited for.
        iteration: what Fuyou measured.
        ordered: what it can swap.
        chosen: what it expected.
    """

    losses: tuple[float, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    iteration: Iteration | None = None
    ordered: Swappable | None = None
    chosen: Times | None = None


def wide_lm(hidden: int = 1024, layers: int = 4, tokens: int = 1024) -> ModelConfig:
    """A byte-level decoder; of four layers and 1,024 wide it has 50 million parameters."""
    return ModelConfig(
        name=f"wide-lm-{hidden}",
        family="llama",
        vocab_size=VOCAB,
        hidden=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        ffn_hidden=hidden * 8 // 3 // 64 * 64,
        max_position=max(512, tokens),
    )


def resident(regime: Regime, steps: int) -> Ran:
    """PyTorch with everything in memory."""
    model = empty(regime.config)
    weights = Cheap(regime.config)
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
    return Ran(tuple(losses), {n: p.detach() for n, p in model.named_parameters()})


def zero_infinity(
    regime: Regime, steps: int, *, first: int = 2, keep: bool = False, recompute: bool = False
) -> Ran:
    """The optimizer works after the backward pass; what autograd saves waits on the host."""
    wanted = Wanted(
        device_bytes=regime.device_bytes,
        host_bytes=2**40,
        param="disk",
        optim="disk",
        act="host",
        sub_group_numel=2**19,
        prefetch_numel=10**7,
        owner=False,
        path=regime.place,
        disk_links=regime.links(),
    )

    def train(comm: Comm) -> Ran:
        made = offloaded(
            empty(regime.config),
            comm,
            AdamW(lr=_LR, fused=False),
            wanted,
            values=Cheap(regime.config).whole,
        )
        return _train(made, regime, steps, first, keep=keep, recompute=recompute)

    return run_ranks(1, train)[0]


def fuyou(
    regime: Regime,
    steps: int,
    *,
    swap: Literal["auto", "all", "none"] | int = "auto",
    first: int = 3,
    keep: bool = False,
) -> Ran:
    """The optimizer works during the backward pass, in a process of its own."""
    wanted = WantedSwap(
        device_bytes=regime.device_bytes,
        host_bytes=regime.host_bytes,
        sub_group_numel=2**19,
        prefetch_numel=10**7,
        swap=swap,
        swap_bytes=2**30,
        path=regime.place,
        disk_links=regime.links(),
    )

    def train(comm: Comm) -> Ran:
        made = fuyou_model(
            empty(regime.config),
            comm,
            AdamW(lr=_LR, fused=False),
            wanted,
            device="cpu",
            values=Cheap(regime.config).whole,
        )
        return _train(made, regime, steps, first, keep=keep)

    return run_ranks(1, train)[0]


def _train(
    made: OffloadedModel,
    regime: Regime,
    steps: int,
    first: int,
    *,
    keep: bool,
    recompute: bool = False,
) -> Ran:
    """Steps from ``first`` count; one ends when the next can begin, the last when all is written."""
    losses, begin = [], 0.0
    with contextlib.closing(made):
        for step in range(steps):
            if step == first:
                begin = time.perf_counter()
            x, y = regime.batch(step)
            if isinstance(made, FuyouModel):
                made.begin(1.0)
            with made.passes("train", x, y):
                loss = made.model.loss_sum(x, y, recompute=recompute) / regime.tokens  # type: ignore[operator]
                loss.backward()
                losses.append(float(loss.detach()))
                del loss
            made.step(1.0)
        if isinstance(made, FuyouModel):
            made.stream.consumer.drain()
        seconds = (time.perf_counter() - begin) / max(1, steps - first)
        values = {n: h.tensor.clone() for n, h in made.held().items()} if keep else {}
    found = Ran(tuple(losses), values, made.tiers.peaks(), seconds)
    if not isinstance(made, FuyouModel):
        return found
    return Ran(
        found.losses,
        values,
        found.peaks,
        seconds,
        made.iteration,
        made.ordered,
        made.chosen,
    )
