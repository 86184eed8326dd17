"""Points of a learning curve, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import PositiveInt

from shoal.core.config import Value
from shoal.core.errors import DataError, require


class CurvePoint(Value):
    """One measured error.

    Args:
        size: training examples, tokens or characters; parameters too, for a joint law.
        value: error or loss in the metric.
        spread: standard deviation of ``value`` over seeds, if there were several.
        trials: validation examples behind an error *rate*, which make zero errors usable.
        model: parameters of the model, for a joint law.
        metric: name of the metric; equal for all points of a curve.
    """

    size: float
    value: float
    spread: float | None = None
    trials: PositiveInt | None = None
    model: float | None = None
    metric: str = ""


def checked(
    points: Sequence[CurvePoint], *, minimum: int = 4, inputs: int = 1, increasing: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places [n, k], values [n] and weights [n] of a curve that a law can be fitted to.

    A zero error rate of ``trials`` examples counts as half an error (Jeffreys' prior).
    Weights are the inverse squares of the values' relative spreads, 1 where unknown.

    Raises:
        DataError: too few points, mixed metrics, a number that is not finite or not
            above zero, or values that grow with size.
    """
    require(
        len(points) >= minimum,
        "learning curve",
        f"{len(points)} points",
        expected=f"at least {minimum} points",
        hint="measure more sizes, or fit a law with fewer parameters",
        error=DataError,
    )
    metrics = sorted({point.metric for point in points})
    require(
        len(metrics) == 1,
        "learning curve",
        ", ".join(map(repr, metrics)),
        expected="one metric",
        hint="fit the metrics one by one",
        error=DataError,
    )
    places, values, weights = [], [], []
    for number, point in enumerate(points):
        where = f"learning curve, point {number}"
        value = point.value
        require(
            math.isfinite(value) and math.isfinite(point.size) and point.size > 0,
            where,
            f"size {point.size}, value {value}",
            expected="a finite value at a size above 0",
            error=DataError,
        )
        if value == 0 and point.trials is not None:
            value = 0.5 / (point.trials + 1)
        require(
            value > 0,
            where,
            value,
            expected="a value above 0, since its logarithm is fitted",
            hint="give trials, the number of validation examples, with a zero error rate",
            error=DataError,
        )
        if inputs == 2:
            require(
                point.model is not None and point.model > 0,
                where,
                point.model,
                expected="the model's parameters above 0",
                error=DataError,
            )
            places.append([float(point.model or 0.0), point.size])
        else:
            places.append([point.size])
        values.append(value)
        weights.append(_weight(point, value))
    x_nk, y_n = np.asarray(places, dtype=float), np.asarray(values, dtype=float)
    w_n = np.asarray(weights, dtype=float)
    # An unknown spread is that of the others.
    known = np.isfinite(w_n)
    w_n[~known] = float(np.median(w_n[known])) if known.any() else 1.0
    require(
        len(np.unique(x_nk, axis=0)) >= minimum,
        "learning curve",
        f"{len(np.unique(x_nk, axis=0))} different sizes",
        expected=f"at least {minimum} different sizes",
        error=DataError,
    )
    if inputs == 1 and not increasing:
        slope = np.polyfit(np.log(x_nk[:, 0]), np.log(y_n), 1)[0]
        require(
            slope < 0,
            "learning curve",
            f"values growing with size (slope {slope:+.3f} on log axes)",
            expected="values that fall as size grows",
            hint="look for a mistake in the measurement, or for overfitting without early stopping",
            error=DataError,
        )
    return x_nk, y_n, w_n / w_n.mean()


def _weight(point: CurvePoint, value: float) -> float:
    spread = point.spread
    if point.trials is not None and value < 1:
        binomial = math.sqrt(value * (1 - value) / point.trials)
        spread = math.hypot(spread or 0.0, binomial)
    if not spread:
        return math.nan
    # Below one part in a thousand the law's own error is larger than the spread's.
    return 1.0 / max(spread / value, 1e-3) ** 2
