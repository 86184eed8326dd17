"""Warm-up, stable, decay.

Source: Hu et al., MiniCPM, 2024, section 4 (WSD); linear decay as in Hägele et al., 2024.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, Work


@part
class WarmupStableDecay:
    """Warm-up, constant rate, linear decay; to extend a run, only the decay is repeated.

    Args:
        warmup: share of the steps in which the learning rate rises linearly.
        decay: share of the steps, at the end, in which the learning rate falls linearly.
        floor: final learning rate as a share of the peak.
    """

    warmup: Annotated[float, Ge(0), Le(1)] = 0.05
    decay: Annotated[float, Ge(0), Le(1)] = 0.7
    floor: Annotated[float, Ge(0), Le(1)] = 0.02

    def __post_init__(self) -> None:
        require(
            self.warmup + self.decay <= 1,
            "lr_schedule.wsd.decay",
            self.decay,
            expected=f"at most 1 - warmup = {1 - self.warmup:g}",
        )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """It costs nothing."""
        return Estimate(step_s=Interval(value=0, low=0, high=0))

    def factor(self, step: int, total: int) -> float:
        """Factor of the peak rate at ``step`` in [0, total)."""
        warm, fall = self.warmup * total, self.decay * total
        if step < warm:
            return (step + 1) / (warm + 1)
        left = (total - step) / fall if fall else 1.0
        return self.floor + (1 - self.floor) * min(1.0, left)
