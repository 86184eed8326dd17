"""What a step saves for its backward pass, three ways: kept, computed again, on a disk.

The same model, the same batch, the same numbers; an arena counts what a step makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shoal.core.measure import interleave
from shoal.kernel.threads import torch_threads
from shoal.memory.activations.ssdtrain import SSDTrain, lifetime_years
from shoal.memory.tiers.device import DeviceScope
from shoal.memory.tiers.tier import BudgetedTier

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.activations.cache import TensorCache
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

WAYS = ("keep", "recompute", "ssdtrain")
_WARM = 3
_ARENA = 2**33


@dataclass(frozen=True)
class ActivationRow:
    """One way and what it cost.

    Args:
        name: of the way.
        peak_bytes: most bytes that a step makes at one time, apart from weights and gradients.
        step_s: median of a step.
        written_bytes: to the disk, in a step.
        stall_s: s of a step for which the disk was waited for.
        years: until a disk is worn out by such steps.
    """

    name: str
    peak_bytes: int
    step_s: float
    written_bytes: float = 0.0
    stall_s: float = 0.0
    years: float = float("inf")


class ActivationSetup:
    """A model in training, and the cache of what it saves."""

    def __init__(
        self, model: Transformer, tokens: Tensor, cache: TensorCache | None, *, recompute: bool
    ) -> None:
        self.model, self.cache, self._recompute = model, cache, recompute
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        """Forward and back."""
        self.model.zero_grad(set_to_none=False)
        if self.cache is None:
            self._passes()
            return
        with self.cache:
            self._passes()

    def peak(self) -> int:
        """Most bytes that a step makes at one time."""
        tier = BudgetedTier("device", _ARENA)
        with DeviceScope(tier, strict=False):
            self.step()
        return tier.stats.peak

    def _passes(self) -> None:
        loss = self.model.loss_sum(self._inputs, self._targets, recompute=self._recompute)
        (loss / self._targets.numel()).backward()  # type: ignore[no-untyped-call]


def way(
    name: str, config: ModelConfig, sequences: int, length: int, disk: SSDTrain, seed: int
) -> ActivationSetup:
    """One way, with random weights and a batch of random tokens."""
    from shoal.model.transformer import Transformer

    torch.manual_seed(seed)
    model = Transformer(config)
    source = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (sequences, length + 1), generator=source)
    cache = disk.apply(model) if name == "ssdtrain" else None
    return ActivationSetup(model, tokens, cache, recompute=name == "recompute")


def compare(
    config: ModelConfig,
    *,
    sequences: int,
    length: int,
    disk: SSDTrain,
    rounds: int = 9,
    seed: int = 0,
) -> list[ActivationRow]:
    """Measure all ways in turns; one thread computes, the other cores move.

    Raises:
        MachineError: the disk's directory cannot be written.
    """
    with torch_threads(1):
        ways = {name: way(name, config, sequences, length, disk, seed) for name in WAYS}
        for one in ways.values():
            for _ in range(_WARM):
                one.step()
        peaks = {name: one.peak() for name, one in ways.items()}
        cache = ways["ssdtrain"].cache
        assert cache is not None
        before = cache.stats.written_bytes, cache.stats.stall_s
        times = interleave({n: one.step for n, one in ways.items()}, rounds, warmup=1, seed=seed)
        written = (cache.stats.written_bytes - before[0]) / (rounds + 1)
        stall = (cache.stats.stall_s - before[1]) / (rounds + 1)
        cache.close()
    rows = []
    for name in WAYS:
        seconds = times.median(name).value
        if name != "ssdtrain":
            rows.append(ActivationRow(name, peaks[name], seconds))
            continue
        years = lifetime_years(disk.endurance, written, seconds)
        rows.append(ActivationRow(name, peaks[name], seconds, written, stall, years))
    return rows
