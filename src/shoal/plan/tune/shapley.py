"""What made the difference: exact Shapley values of a surrogate over at most seven axes.

The value of a set of axes is the surrogate's mean prediction when these axes are as in the
configuration and the others as in each configuration of a background. All 2^n sets are
evaluated, so the values of a configuration add up to its prediction less the background's mean.

Sources: Shapley, A Value for n-Person Games, 1953; Strumbelj and Kononenko, Explaining
Prediction Models and Individual Predictions with Feature Contributions, 2014.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.random import generator
from shoal.plan.tune.bayes import penalised
from shoal.plan.tune.protocols import TuningResult
from shoal.plan.tune.surrogate import Kind, fit_surrogate

MOST_AXES = 7
BACKGROUND = 32

Predict = Callable[[np.ndarray], np.ndarray]


class Influence(Value):
    """How much an axis moves the objective.

    Args:
        influence: mean absolute Shapley value over the trials, in the objective's unit.
        best: its value in the best trial: what it adds there to the mean.
        by_value: setting, as text -> mean Shapley value of the trials that have it.
    """

    axis: str
    influence: float
    best: float
    by_value: dict[str, float]


def shapley(predict: Predict, points: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Shapley values of each point: [N, A].

    Args:
        predict: [M, A] -> [M].
        points: [N, A] configurations.
        background: [B, A] configurations that stand for the others.

    Raises:
        ConfigError: more than seven axes, or an empty background.
    """
    points, background = np.atleast_2d(points), np.atleast_2d(background)
    N, axes = points.shape
    require(
        axes <= MOST_AXES,
        "tune.explain",
        axes,
        expected=f"at most {MOST_AXES} axes with several values",
        hint="fix some of them",
    )
    require(len(background) > 0, "tune.background", 0, expected="at least one configuration")
    worth = np.empty((2**axes, N))
    for subset in range(2**axes):
        inside = np.array([subset >> axis & 1 for axis in range(axes)], dtype=bool)
        mixed = np.where(inside, points[:, None], background[None])
        worth[subset] = predict(mixed.reshape(-1, axes)).reshape(N, -1).mean(axis=1)
    array = np.zeros((N, axes))
    for axis in range(axes):
        for subset in range(2**axes):
            if subset >> axis & 1:
                continue
            size = subset.bit_count()
            weight = math.factorial(size) * math.factorial(axes - size - 1) / math.factorial(axes)
            array[:, axis] += weight * (worth[subset | 1 << axis] - worth[subset])
    return array


def explain(study: TuningResult, *, surrogate: Kind = "gp", seed: int = 0) -> list[Influence]:
    """Axes by influence, largest first, on a surrogate fitted to the trials, failures included.

    Axes that had no choice are left out.

    Raises:
        PlanError: every trial failed.
        ConfigError: more than seven axes had a choice.
    """
    best = study.best
    rows = np.array([study.space.row(trial.config) for trial in study.trials])
    open_ = [n for n, axis in enumerate(study.space.axes) if len(axis.values) > 1]
    points = study.space.points(rows)[:, open_]
    fitted = fit_surrogate(surrogate, points, penalised(study.trials), seed)
    order = generator(seed, purpose="shapley background").permutation(len(points))[:BACKGROUND]
    values = shapley(fitted.mean, points, points[order])
    place = study.trials.index(best)
    results = []
    for column, number in enumerate(open_):
        axis = study.space.axes[number]
        by_value = {
            str(value): float(values[rows[:, number] == n, column].mean())
            for n, value in enumerate(axis.values)
            if (rows[:, number] == n).any()
        }
        results.append(
            Influence(
                axis=axis.name,
                influence=float(np.abs(values[:, column]).mean()),
                best=float(values[place, column]),
                by_value=by_value,
            )
        )
    return sorted(results, key=lambda one: -one.influence)
