"""A model's offloaded state at the moments of a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from shoal.ir.hooks import StepHook, TrainStep
from shoal.memory.protocols import EarlyUpdater

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.protocols import TieredModel


class OffloadHook(StepHook):
    """Brings a model's state to the device around passes, and reports what its tiers held."""

    kind = "offload"

    def __init__(self, offloaded: TieredModel) -> None:
        self.offloaded = offloaded

    def before_step(self, step: TrainStep) -> None:
        """Pass the factor to what updates during the passes."""
        if isinstance(self.offloaded, EarlyUpdater):
            self.offloaded.begin(step.factor, step.changing)

    def passes(self, what: str, *inputs: Tensor | None) -> AbstractContextManager[None]:
        """Around the engine's passes, with gradients or without."""
        return nullcontext() if what == "step" else self.offloaded.passes(what, *inputs)

    @contextlib.contextmanager
    def lent(self, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Parameters of these names whose gradients may be changed meanwhile."""
        here = self.offloaded.lend(names)
        yield here
        self.offloaded.take_back(here)

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """Most bytes of each tier, and how steps go on where that was just chosen."""
        choice = getattr(self.offloaded, "choice", lambda: None)()
        peaks = {"step": {"tier_bytes": self.offloaded.tiers.peaks()}}
        return peaks if choice is None else {**peaks, "swap": choice}

    def close(self) -> None:
        """Give the places back."""
        self.offloaded.close()
