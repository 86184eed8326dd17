"""Questions to a learning curve: which law, how much data, what is odd, where are we.

Source: Hestness et al., 2017, sections 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import DataError, require
from shoal.core.parts import table
from shoal.cost.scaling.curve import Point, checked
from shoal.cost.scaling.fit import Fitted, fit
from shoal.ir import Interval

__all__ = ["Regimes", "compute_needed", "data_needed", "fit_best", "is_outlier", "regimes"]

CURVE_LAWS = ("power", "power_floor", "three_regime")


class Regimes(Value):
    """Where a curve is what.

    Args:
        best_guess_until: the plateau of small data ends here; None if there is none.
        power_from: first size of the power-law region.
        power_until: last size of it.
        floor_from: the curve flattens from here; None if it does not.
        exponent: slope of the power-law region on log axes.
    """

    best_guess_until: float | None = None
    power_from: float
    power_until: float
    floor_from: float | None = None
    exponent: float


def fit_best(points: Sequence[Point], *, laws: Sequence[str] = CURVE_LAWS, seed: int = 0) -> Fitted:
    """The law with the smallest corrected Akaike criterion; the simplest if all are undefined.

    Laws that need more points than there are do not take part.

    Raises:
        DataError: the points cannot be fitted.
    """
    number = len({point.size for point in points})
    able = [name for name in laws if table("law").load(name).min_points <= number]
    if not able:
        able = [min(laws, key=lambda name: table("law").load(name).min_points)]
    drafts = [fit(name, points, seed=seed, replicates=0) for name in able]
    best = min(drafts, key=lambda found: math.inf if found.aicc is None else found.aicc)
    return fit(best.law, points, seed=seed)


def data_needed(fitted: Fitted, target: float) -> Interval | None:
    """Data at which the error falls to ``target``; None if the floor is above it.

    Raises:
        DataError: the target is not above zero.
    """
    require(target > 0, "target", target, expected="an error above 0", error=DataError)
    return fitted.invert(target)


def compute_needed(
    fitted: Fitted, target: float, *, flops_per_example: float, flops_per_s: float
) -> Interval | None:
    """Seconds of one pass over the data that ``target`` needs, at a rate of a machine.

    Args:
        fitted: the curve's law.
        target: error wanted.
        flops_per_example: FLOP of training on one example once.
        flops_per_s: what the machine reaches.
    """
    data = data_needed(fitted, target)
    return None if data is None else data.scaled(flops_per_example / flops_per_s)


def is_outlier(points: Sequence[Point], point: Point, *, law: str = "power") -> bool:
    """A measurement more than 3 sigma off the law of the other points: look for a mistake."""
    others = [p for p in points if p is not point and p.size != point.size]
    fitted = fit(law, others, replicates=0)
    value = fitted.predict(point.size).value
    own = (point.spread or 0.0) / point.value if point.value > 0 else 0.0
    sigma = max(math.hypot(fitted.sigma, own), 1e-9)
    observed = point.value
    if observed <= 0:
        return True
    return abs(math.log(observed / value)) > 3 * sigma


def regimes(points: Sequence[Point], *, tolerance: float = 0.03) -> Regimes:
    """The longest run of points that one straight line on log axes explains, and its sides.

    Args:
        points: the curve.
        tolerance: residuals of the line, as a share, that are still noise; raised to the
            points' own spread where that is larger.

    Raises:
        DataError: the points cannot be fitted.
    """
    x_nk, y_n, _ = checked(points)
    order = np.argsort(x_nk[:, 0])
    log_m, log_y = np.log(x_nk[order, 0]), np.log(y_n[order])
    spreads = [p.spread / p.value for p in points if p.spread and p.value > 0]
    noise = max(tolerance, 2 * float(np.median(spreads)) if spreads else 0.0)
    n = len(log_m)
    best: tuple[int, float, int, int, float] | None = None
    for first in range(n - 2):
        for last in range(first + 2, n):
            part = slice(first, last + 1)
            slope, offset = np.polyfit(log_m[part], log_y[part], 1)
            worst = float(np.abs(log_y[part] - slope * log_m[part] - offset).max())
            if worst > noise or slope >= -0.01:
                continue
            # The longest run; among equals the steepest, which is not a side.
            key = (last - first, -slope, first, last, float(slope))
            if best is None or key[:2] > best[:2]:
                best = key
    if best is None:
        raise DataError(
            "learning curve: no three neighbouring points lie on a falling line within "
            f"{100 * noise:.0f} %; measure with more seeds, or more sizes"
        )
    _, _, first, last, slope = best

    def flat(part: slice) -> bool:
        if len(log_m[part]) < 2:
            return False
        return bool(np.polyfit(log_m[part], log_y[part], 1)[0] > 0.5 * slope)

    # The outer halves of the sides, where they are most what they are.
    plateau = flat(slice(0, max(2, first // 2 + 1))) and first > 0
    floor = flat(slice(min(n - 2, (last + n) // 2), n)) and last < n - 1
    return Regimes(
        best_guess_until=float(np.exp(log_m[first])) if plateau else None,
        power_from=float(np.exp(log_m[first])),
        power_until=float(np.exp(log_m[last])),
        floor_from=float(np.exp(log_m[last])) if floor else None,
        exponent=slope,
    )
