"""Questions to a learning curve: which law, how much data, what is odd, where are we.

Source: Hestness et al., 2017, sections 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import DataError, require
from shoal.core.parts import table
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import FittedLaw, fit
from shoal.ir import Interval

CURVE_LAWS = ("power", "power_floor", "three_regime")


def fit_best(
    points: Sequence[CurvePoint], *, laws: Sequence[str] = CURVE_LAWS, seed: int = 0
) -> FittedLaw:
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


def data_needed(fitted: FittedLaw, target: float) -> Interval | None:
    """Data at which the error falls to ``target``; None if the floor is above it.

    Raises:
        DataError: the target is not above zero.
    """
    require(target > 0, "target", target, expected="an error above 0", error=DataError)
    return fitted.invert(target)
