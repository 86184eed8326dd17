"""Which of many positive values are no chance: thresholds that know how many there are.

Delays vary by factors, so they are compared on the log scale, where most of them are normal around
a common middle. Middle and scale are those of the values that agree, as found from the shortest
half of them, which slow ones, all on one side, do not move. A value is no chance where so large a
one, among as many, comes by chance with a small probability; a line of a matrix where so many of
its cells do. That the scale is estimated from few values makes the tails heavier: they are those
of Student's t, with degrees of freedom from a simulation of 200,000 draws for each number of
values (4,000 for the largest).

Source: Rousseeuw and Leroy, Robust Regression and Outlier Detection, 1987, chapter 4 (the shortest
half, and a scale of the values that it does not reject); Iglewicz and Hoaglin, How to Detect and
Handle Outliers, 1993 (thresholds by the number of values).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Values -> degrees of freedom of Student's t whose tail is that of the largest of them.
_VALUES = (6, 9, 12, 20, 30, 56, 132, 240, 992, 4032)
_FREEDOM = (1.5, 2.5, 2.8, 5.4, 10.3, 30.0, 66.0, 110.0, 175.0, 400.0)
# Values farther from the middle than so many scales are not used for either.
_CUT = 3.0
_ROUNDS = 12
_TINY = 1e-12


class Normal(NamedTuple):
    """What values that agree are like, on the log scale.

    Args:
        middle: of their logarithms.
        scale: standard deviation of these.
        num_values: how many values there were.
    """

    middle: float
    scale: float
    num_values: int

    def z(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far values lie above the middle, in scales; NaN where there is none."""
        return (np.log(np.maximum(values, _TINY)) - self.middle) / self.scale

    def tail(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probability of one value so far above the middle, or farther."""
        from scipy.stats import t

        freedom = np.exp(np.interp(np.log(self.num_values), np.log(_VALUES), np.log(_FREEDOM)))
        tail: NDArray[np.float64] = t.sf(z, freedom)
        return tail

    def line_tail(self, line: NDArray[np.float64], share: float) -> float:
        """Probability that so many of a line's values lie so far above the middle.

        Args:
            line: z of values; NaN where there is none.
            share: of them that counts; the least of the largest ``share`` is how far they lie.
        """
        from scipy.stats import binom

        least, many, of = _least(line, share)
        return float(binom.sf(many - 1, of, self.tail(np.array(least))))


def line_tail_apart(
    line: NDArray[np.float64], rest: NDArray[np.float64], share: float, *, floor: float = 0.02
) -> float:
    """As :meth:`Normal.line_tail`, of a line that is itself a large part of few values.

    Middle and scale are the mean and the standard deviation of the other values alone, all of
    which are taken for usual ones: a second fault among them hides the first, and nothing more. The
    probability is averaged over the scales that so few values may come from.

    Args:
        line: positive values; NaN where there is none.
        rest: those that say what is usual, at least 3.
        share: as there.
        floor: as of :func:`fit`.
    """
    from scipy.stats import binom, chi2, norm

    logs = np.log(np.maximum(rest[np.isfinite(rest)], _TINY))
    scale = max(float(logs.std(ddof=1)), floor) * np.sqrt(1 + 1 / len(logs))
    least, many, of = _least(np.log(np.maximum(line, _TINY)), share)
    # The ratio of the scale that was estimated to the true one, and its density.
    ratio = np.logspace(-3, 1, 1000)
    freedom = len(logs) - 1
    density = chi2.pdf(freedom * ratio**2, freedom) * 2 * freedom * ratio
    tail = binom.sf(many - 1, of, norm.sf((least - logs.mean()) / scale * ratio))
    return float(np.trapezoid(density * tail, ratio))


def _least(line: NDArray[np.float64], share: float) -> tuple[float, int, int]:
    """The least of a share of the largest values, how many these are, and of how many."""
    values = np.sort(line[np.isfinite(line)])[::-1]
    many = max(1, int(np.ceil(share * len(values) - 1e-9)))
    return float(values[many - 1]), many, len(values)


def fit(values: NDArray[np.float64], *, floor: float = 0.02) -> Normal:
    """Middle and scale of the values that agree.

    Args:
        values: positive, of any shape; NaN where there is none.
        floor: smallest scale: agreement closer than any clock's must not turn a hair's breadth
            into a deviation.
    """
    logs = np.sort(np.log(np.maximum(values[np.isfinite(values)], _TINY)))
    half = (len(logs) + 1) // 2
    widths = logs[half - 1 :] - logs[: len(logs) - half + 1]
    start = int(np.argmin(widths))
    middle = float(logs[start] + logs[start + half - 1]) / 2
    scale = max(1.4826 * float(widths[start]) / 2, floor)
    for _ in range(_ROUNDS):
        agree = logs[np.abs(logs - middle) <= _CUT * scale]
        middle = float(agree.mean())
        scale = max(float(agree.std(ddof=1)) if len(agree) > 1 else 0.0, floor)
    return Normal(middle, scale, len(logs))
