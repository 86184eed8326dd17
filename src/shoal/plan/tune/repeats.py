"""Measure again until the mean is known well enough, in two stages.

Stopping as soon as an interval happens to be narrow makes it narrower than it may be. Stein's way
does not: the first stage alone shows how much the measurements spread, and so how many are needed.
The interval of the mean of all of them holds its confidence for normal errors, however many those
are.

Source: Stein, A Two-sample Test for a Linear Hypothesis Whose Power Is Independent of the
Variance, 1945.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import require


@dataclass(frozen=True)
class RepeatedMeasurements:
    """Repeated measurements of configurations.

    Args:
        samples: every measurement.
        half: half of the interval's width; infinite after a single one.
    """

    samples: tuple[float, ...]
    half: float

    @property
    def mean(self) -> float:
        """Mean of the samples."""
        return float(np.mean(self.samples))

    @property
    def width(self) -> float:
        """Half of the interval's width, as a share of the mean."""
        return self.half / abs(self.mean) if self.mean else math.inf


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """How often something is measured.

    Args:
        width: half of the interval's width that is wanted, as a share of the mean.
        first: measurements of the first stage.
        most: measurements at most; the interval is wider than wanted where they are too few.
        confidence: of the interval.
    """

    width: float = 0.05
    first: int = 3
    most: int = 8
    confidence: float = 0.95

    def __post_init__(self) -> None:
        require(self.width > 0, "repeats.width", self.width, expected="above 0")
        require(self.first >= 1, "repeats.first", self.first, expected="1 or more")
        require(
            self.most >= self.first,
            "repeats.most",
            self.most,
            expected=f"{self.first} (repeats.first) or more",
        )
        require(
            0 < self.confidence < 1, "repeats.confidence", self.confidence, expected="in (0, 1)"
        )

    def measure(self, once: Callable[[], float]) -> RepeatedMeasurements:
        """Measure as often as it takes; ``once`` gives one measurement."""
        from scipy.stats import t as student

        samples = [once() for _ in range(self.first)]
        if self.first == 1:
            return RepeatedMeasurements(tuple(samples), math.inf)
        spread = float(np.std(samples, ddof=1))
        reach = float(student.ppf(0.5 + self.confidence / 2, self.first - 1)) * spread
        wanted = self.width * abs(float(np.mean(samples)))
        number = math.ceil((reach / wanted) ** 2) if wanted else self.first
        samples += [once() for _ in range(min(number, self.most) - self.first)]
        return RepeatedMeasurements(tuple(samples), reach / math.sqrt(len(samples)))
