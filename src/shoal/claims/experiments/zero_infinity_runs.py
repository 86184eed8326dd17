"""Training runs in budgets: plain, and with the state in tiers."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from shoal.claims.experiments.fuyou_runs import wide_lm
from shoal.claims.lab.measure_passes import PlaceholderWeights
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import TierFullError
from shoal.core.random import generator
from shoal.ir import TrainJob, Work
from shoal.memory.streaming.build import TierAssignment, offloaded
from shoal.memory.streaming.needs import needs
from shoal.memory.streaming.offloaded import OffloadedModel
from shoal.memory.tiers.device import DeviceScope
from shoal.memory.tiers.mover import EmulatedLink
from shoal.memory.tiers.tier import BudgetedTier
from shoal.model.config import ModelConfig
from shoal.model.initialise import empty
from shoal.model.transformer import Transformer
from shoal.train.optimizers.adamw import AdamW

if TYPE_CHECKING:
    from shoal.ir.comm import Comm

VOCAB = 256
LAYERS = 4
TOKENS = 32
_LR = 1e-3
_TIERS = {"param": "disk", "optim": "disk", "act": "device"}


class Budgets(NamedTuple):
    """Bytes of device and host."""

    device: int
    host: int


class OffloadRunResult(NamedTuple):
    """Parameters, their values if they are compared, most bytes by tier, s of every step."""

    parameters: int
    values: dict[str, Tensor]
    peaks: dict[str, float]
    predicted: dict[str, float]
    seconds: tuple[float, ...] = ()


def model_of(hidden: int) -> ModelConfig:
    """A byte-level decoder of four layers, four times as wide inside."""
    return wide_lm(hidden, LAYERS, 512)


def _batch(seed: int, step: int, tokens: int) -> tuple[Tensor, Tensor]:
    ids = generator(seed, purpose="zero infinity", step=step).integers(0, VOCAB, (1, tokens + 1))
    whole = torch.from_numpy(ids)
    return whole[:, :-1].clone(), whole[:, 1:].clone()


def _count(config: ModelConfig) -> int:
    return sum(p.numel() for p in empty(config).parameters())


def plain(
    config: ModelConfig, device_bytes: int, *, steps: int, seed: int, keep: bool = False
) -> OffloadRunResult | None:
    """PyTorch with everything on the device; None where that has no room."""
    tier = BudgetedTier("device", device_bytes)
    scope = DeviceScope(tier)
    weights = PlaceholderWeights(config)
    model = empty(config)
    try:
        for name, parameter in list(model.named_parameters()):
            tier_room = scope.adopt(weights.whole(name), name)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tier_room))
            del parameter
        updater = AdamW(lr=_LR, fused=False).build(dict(model.named_parameters()))
        for step in range(steps):
            x, y = (scope.adopt(part) for part in _batch(seed, step, TOKENS))
            with scope:
                (model.loss_sum(x, y) / TOKENS).backward()  # type: ignore[no-untyped-call]
                updater.step(1.0)
                for parameter in model.parameters():
                    parameter.grad = None
    except TierFullError:
        return None
    values = {n: p.detach() for n, p in model.named_parameters()} if keep else {}
    return OffloadRunResult(_count(config), values, {"device": tier.stats.peak}, {})


def streamed(
    config: ModelConfig,
    budgets: Budgets,
    place: Path,
    *,
    steps: int,
    seed: int,
    keep: bool = False,
    tiles: int = 1,
    links: dict[str, EmulatedLink] | None = None,
    tokens: int = TOKENS,
    **tiers: Any,
) -> OffloadRunResult | None:
    """ZeRO-Infinity, parameters on disk; None where the budgets have no room."""
    how: dict[str, Any] = {"prefetch_numel": 10**6, "sub_group_numel": 10**6, **_TIERS, **tiers}

    def train(comm: Comm) -> OffloadRunResult:
        model = empty(config)
        made = _offloaded(model, comm, budgets, place, tiles=tiles, links=links or {}, **how)
        seconds = []
        with contextlib.closing(made):
            for step in range(steps):
                x, y = _batch(seed, step, tokens)
                begin = time.perf_counter()
                with made.passes("train", x, y):
                    (model.loss_sum(x, y) / tokens).backward()  # type: ignore[no-untyped-call]
                made.step(1.0)
                seconds.append(time.perf_counter() - begin)
            values = {n: h.tensor.clone() for n, h in made.held().items()} if keep else {}
        peaks = {tier: float(peak) for tier, peak in made.tiers.peaks().items()}
        return OffloadRunResult(_count(config), values, peaks, fields, tuple(seconds))

    job = TrainJob(seq_len=tokens, global_batch=1, microbatch=1, precision="fp32", steps=1)
    result = needs(Work(shape=config.shape(), job=job), **how)
    fields = {"device": result.device, "host": result.host, "disk": result.disk}
    try:
        return run_ranks(1, train)[0]
    except TierFullError:
        return None


def _offloaded(
    model: Transformer, comm: Comm, budgets: Budgets, place: Path, **how: Any
) -> OffloadedModel:
    how = {"sub_group_numel": 10**6, "owner": False, **_TIERS, **how}
    wanted = TierAssignment(device_bytes=budgets.device, host_bytes=budgets.host, path=place, **how)
    rule = AdamW(lr=_LR, fused=False)
    return offloaded(model, comm, rule, wanted, values=PlaceholderWeights(model.config).whole)


def fetch_seconds(
    config: ModelConfig, place: Path, *, owner: bool, bytes_per_s: float, rounds: int
) -> tuple[float, ...]:
    """Seconds for which the forward passes of two ranks wait for parameters, each round.

    Each rank has a disk of its own rate, and nothing is fetched ahead.
    """
    budgets = Budgets(2**28, 2**28)

    def train(comm: Comm) -> tuple[float, ...]:
        model = empty(config)
        links = {"read": EmulatedLink(bytes_per_s)}
        how: dict[str, Any] = {"prefetch_numel": 0, "owner": owner, "links": links}
        with contextlib.closing(_offloaded(model, comm, budgets, place, **how)) as made:
            results = []
            for step in range(rounds + 1):
                x, y = _batch(comm.rank, step, 8)
                before = made.stream.waited_s
                comm.barrier()
                with torch.no_grad(), made.passes("score", x, y):
                    model.loss_sum(x, y)
                results.append(made.stream.waited_s - before)
            return tuple(results[1:])

    both = run_ranks(2, train)
    return tuple(max(pair) for pair in zip(*both, strict=True))
