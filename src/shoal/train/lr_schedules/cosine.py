"""Warm-up, then half a cosine.

Source: Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts.
"""

from __future__ import annotations

import math

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, Work

__all__ = ["Cosine"]


@part
class Cosine:
    """The usual choice when the length of the run is known.

    Args:
        warmup: share of the steps in which the rate rises linearly.
        floor: last factor.
    """

    warmup: float = 0.05
    floor: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.warmup <= 1, "lr_schedule.cosine.warmup", self.warmup, expected="0 to 1")
        require(0 <= self.floor <= 1, "lr_schedule.cosine.floor", self.floor, expected="0 to 1")

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """It costs nothing."""
        return Estimate(step_s=Interval(value=0, low=0, high=0))

    def factor(self, step: int, total: int) -> float:
        """Factor of the peak rate at ``step`` in [0, total)."""
        warm = self.warmup * total
        if step < warm:
            return (step + 1) / (warm + 1)
        progress = min(1.0, (step - warm) / max(1.0, total - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
