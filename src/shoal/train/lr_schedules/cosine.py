"""Warm-up, then half a cosine.

Source: Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts.
"""

from __future__ import annotations

import math
from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import Estimate, Interval, Machine, Work


@part
class Cosine:
    """Cosine decay after a linear warm-up; the usual choice if the length of the run is known.

    Args:
        warmup: share of the steps in which the learning rate rises linearly.
        floor: final learning rate as a share of the peak.
    """

    warmup: Annotated[float, Ge(0), Le(1)] = 0.05
    floor: Annotated[float, Ge(0), Le(1)] = 0.1

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
