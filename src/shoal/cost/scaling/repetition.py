"""The worth of data that are seen again: utility that halves, and unions of pools.

A pool is m examples of one quality. After n samples, k = ceil(n / m) passes, error is

    y = a n_1^b  prod_{j=2..k} (n_j / n_{j-1})^(b 2^(-(j-1) / tau)) + d,   n_j = min(n, j m)

with the pool's utility b < 0 and its half-life tau in passes; a and d are shared by all pools. A
union of p equal pools has passes of p m samples, half-lives p tau_i, and in pass j the mean of the
pools' exponents. So what pools are worth together follows from each alone.

Source: Goyal et al., Scaling Laws for Data Filtering: Data Curation cannot be Compute Agnostic,
2024, sections 4 and 5. Two simpler laws to compare with: a sample counts less when it is repeated
(Muennighoff et al., Scaling Data-Constrained Language Models, 2023, equation 5), and a sample
counts the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize

from shoal.core.errors import ConfigError, require
from shoal.core.random import generator
from shoal.ir.estimate import Interval

_Floats = npt.NDArray[np.float64]

# Any subset is tried of so many pools; of more, the best ones first.
_SUBSETS = 12
# Points after the first pass without which a half-life cannot be known.
_PAST = 3
_UTILITY, _HALF_LIFE = (1e-3, 2.0), (0.05, 100.0)
_STARTS, _REPLICATES = 3, 24


class PoolCurve(NamedTuple):
    """A learning curve on one pool.

    Args:
        size: examples of the pool.
        samples: float64 [points], samples seen, passes counted.
        errors: float64 [points], above 0.
    """

    size: int
    samples: _Floats
    errors: _Floats


class PoolChoice(NamedTuple):
    """Which pools are best for a budget of samples.

    Args:
        budget: samples.
        pools: their numbers, the best first.
        error: predicted, with its 90 % interval.
    """

    budget: float
    pools: tuple[int, ...]
    error: Interval


def log_worth(samples: _Floats, size: int, utilities: _Floats, half_lives: _Floats) -> _Floats:
    """Logarithm of (y - d) / a after so many samples of a union of equal pools, [points].

    Args:
        samples: float64 [points].
        size: examples of each pool.
        utilities: float64 [p], b of each, below 0.
        half_lives: float64 [p], in passes over the pool alone.
    """
    count = len(utilities)
    passes = np.arange(1, max(1, math.ceil(samples.max() / (count * size))) + 1)
    seen = np.minimum(samples[:, None], passes * float(count * size))
    before = np.concatenate([np.ones((len(samples), 1)), seen[:, :-1]], axis=1)
    decay = 0.5 ** ((passes - 1)[:, None] / (count * half_lives))
    return np.asarray((np.log(seen) - np.log(before)) @ (utilities * decay).mean(axis=1))


def log_worth_of_effective(
    samples: _Floats, size: int, utilities: _Floats, half_lives: _Floats
) -> _Floats:
    """The same where repetition discounts the number of samples, and no utility.

    Args:
        samples: float64 [points].
        size: examples of each pool.
        utilities: float64 [p], b of each, below 0.
        half_lives: float64 [p], repetitions after which a sample has 1/e of its worth.
    """
    whole, lasting = float(len(utilities) * size), float(half_lives.mean())
    again = np.maximum(samples / whole - 1, 0.0)
    effective = np.minimum(samples, whole) + whole * lasting * -np.expm1(-again / lasting)
    return np.asarray(utilities.mean() * np.log(effective))


def log_worth_of_plain(
    samples: _Floats, size: int, utilities: _Floats, half_lives: _Floats
) -> _Floats:
    """The same where a repeated sample is as good as a new one; half-lives are not used."""
    return np.asarray(utilities.mean() * np.log(samples))


RepetitionForm = Literal["utility", "effective", "plain"]
_WORTH = {
    "utility": log_worth,
    "effective": log_worth_of_effective,
    "plain": log_worth_of_plain,
}


@dataclass(frozen=True)
class RepetitionLaw:
    """The law of some equal pools.

    Args:
        size: examples of a pool.
        parameters: float64 [2 + 2p]: log a, log d, log -b of each pool, log tau of each.
        replicates: float64 [R, 2 + 2p], of refits to resampled residuals.
        form: what repetition does: ``utility`` halves, fewer ``effective`` samples, or nothing.
    """

    size: int
    parameters: _Floats
    replicates: _Floats
    form: RepetitionForm = "utility"

    @property
    def pools(self) -> int:
        """How many."""
        return (len(self.parameters) - 2) // 2

    @property
    def utilities(self) -> _Floats:
        """Float64 [p], b of each pool."""
        return -np.exp(self.parameters[2 : 2 + self.pools])

    @property
    def half_lives(self) -> _Floats:
        """Float64 [p], in passes."""
        return np.asarray(np.exp(self.parameters[2 + self.pools :]))

    @property
    def scale(self) -> float:
        """a, the error that one sample leaves above the floor."""
        return math.exp(self.parameters[0])

    @property
    def floor(self) -> float:
        """d, the error that no data remove."""
        return math.exp(self.parameters[1])

    def errors(self, samples: npt.ArrayLike, pools: Sequence[int]) -> _Floats:
        """Float64 [points]: predicted errors of a union.

        Args:
            samples: [points], samples seen.
            pools: numbers of the pools.
        """
        at = np.atleast_1d(samples).astype(float)
        return _errors(self.parameters, at, self.size, pools, self.form)

    def predict(self, samples: float, pools: Sequence[int]) -> Interval:
        """The error of a union, with its 90 % interval."""
        value = float(self.errors(samples, pools)[0])
        at = np.array([float(samples)])
        of = (_errors(one, at, self.size, pools, self.form) for one in self.replicates)
        drawn = [float(errors[0]) for errors in of]
        low, high = np.percentile([value, *drawn], [5, 95])
        return Interval(value=value, low=min(low, value), high=max(high, value))

    def choose(self, budget: float) -> PoolChoice:
        """The best union for a budget.

        Args:
            budget: samples that are trained on, repetitions counted.
        """
        require(budget >= 1, "budget", budget, expected="at least one sample")
        best = min(self._unions(), key=lambda pools: float(self.errors(budget, pools)[0]))
        return PoolChoice(budget, best, self.predict(budget, best))

    def frontier(self, budgets: Iterable[float]) -> list[PoolChoice]:
        """The best union of each budget."""
        return [self.choose(budget) for budget in budgets]

    def _unions(self) -> Iterable[tuple[int, ...]]:
        order = np.argsort(self.utilities, kind="stable").tolist()
        if self.pools > _SUBSETS:
            return [tuple(order[:count]) for count in range(1, self.pools + 1)]
        counts = range(1, self.pools + 1)
        return itertools.chain(*(itertools.combinations(order, count) for count in counts))


def _errors(
    parameters: _Floats,
    samples: _Floats,
    size: int,
    pools: Sequence[int],
    form: RepetitionForm = "utility",
) -> _Floats:
    count, chosen = (len(parameters) - 2) // 2, np.asarray(pools)
    utilities = -np.exp(parameters[2 + chosen])
    half_lives = np.exp(parameters[2 + count + chosen])
    worth = _WORTH[form](samples, size, utilities, half_lives)
    return np.asarray(np.exp(parameters[0] + worth) + np.exp(parameters[1]))


def fit_pools(
    curves: Sequence[PoolCurve], *, seed: int = 0, form: RepetitionForm = "utility"
) -> RepetitionLaw:
    """Fit the law to the curves of single pools, jointly.

    The sum of squares has many valleys, so a grid over all parameters gives the starts.

    Args:
        curves: one for each pool, of pools of equal size.
        seed: of the resampled residuals.
        form: what repetition does, as of :class:`RepetitionLaw`.

    Raises:
        ConfigError: pools of different sizes, too few points past the first pass, an error that is
            not above 0, or a pool from which nothing is learned.
    """
    sizes = sorted({curve.size for curve in curves})
    if len(sizes) != 1:
        raise ConfigError(
            f"pools of {', '.join(map(str, sizes)) or 'no'} examples: expected pools of one size"
        )
    for number, curve in enumerate(curves):
        past = int((curve.samples > curve.size).sum())
        if past < _PAST:
            raise ConfigError(
                f"pool {number}: {past} points past its first pass of {curve.size} samples; the "
                f"half-life of repeated data needs {_PAST} or more: train for longer"
            )
        if not (np.isfinite(curve.errors).all() and (curve.errors > 0).all()):
            raise ConfigError(f"pool {number}: expected errors above 0 at every point")
        if (curve.samples < 1).any():
            raise ConfigError(f"pool {number}: expected one sample or more at every point")
        if np.polyfit(np.log(curve.samples), np.log(curve.errors), 1)[0] >= 0:
            raise ConfigError(
                f"pool {number}: its error does not fall with more samples (b >= 0); leave the "
                "pool out, or measure it with less noise"
            )
    logs = [np.log(curve.errors) for curve in curves]
    found = min(
        (_descended(curves, logs, start, form) for start in _starts(curves, form)),
        key=lambda one: one.cost,
    )
    fitted = [
        np.log(_errors(found.x, curve.samples, curve.size, [number], form))
        for number, curve in enumerate(curves)
    ]
    draw, drawn = generator(seed, purpose="pool residuals"), []
    for _ in range(_REPLICATES):
        again = [
            middle + draw.choice(log - middle, len(log))
            for middle, log in zip(fitted, logs, strict=True)
        ]
        drawn.append(_descended(curves, again, found.x, form).x)
    return RepetitionLaw(sizes[0], found.x, np.array(drawn), form)


def _bounds(curves: Sequence[PoolCurve]) -> tuple[_Floats, _Floats]:
    least = min(float(curve.errors.min()) for curve in curves)
    ends = [(-30.0, 30.0), (math.log(least) - 12, math.log(least) - 1e-3)]
    ends += [tuple(np.log(_UTILITY))] * len(curves) + [tuple(np.log(_HALF_LIFE))] * len(curves)
    low, high = np.array(ends).T
    return low, high


def _descended(
    curves: Sequence[PoolCurve], logs: Sequence[_Floats], start: _Floats, form: RepetitionForm
) -> optimize.OptimizeResult:
    low, high = _bounds(curves)

    def residuals(parameters: _Floats) -> _Floats:
        parts = [
            np.log(_errors(parameters, curve.samples, curve.size, [number], form)) - log
            for number, (curve, log) in enumerate(zip(curves, logs, strict=True))
        ]
        return np.concatenate(parts)

    inside = np.clip(start, low + 1e-6, high - 1e-6)
    return optimize.least_squares(residuals, inside, bounds=(low, high), xtol=1e-8, ftol=1e-8)


def _starts(curves: Sequence[PoolCurve], form: RepetitionForm) -> list[_Floats]:
    """The best points of a grid: of each a and d the best b and tau of every pool by itself."""
    utilities, half_lives = np.geomspace(0.02, 1.2, 18), np.geomspace(0.3, 30.0, 8)
    pairs = [(b, tau) for b in utilities for tau in half_lives]
    worths = [
        np.array(
            [
                _WORTH[form](curve.samples, curve.size, np.array([-b]), np.array([tau]))
                for b, tau in pairs
            ]
        )
        for curve in curves
    ]
    least = min(float(curve.errors.min()) for curve in curves)
    results: list[tuple[float, _Floats]] = []
    for share in (1e-4, 0.3, 0.6, 0.8, 0.9, 0.97):
        above = [
            np.log(curve.errors - share * least) - worth
            for curve, worth in zip(curves, worths, strict=True)
        ]
        means, spreads = [one.mean(axis=1) for one in above], [one.var(axis=1) for one in above]
        for log_a in np.linspace(min(map(np.min, means)), max(map(np.max, means)), 60):
            costs = [s + (m - log_a) ** 2 for m, s in zip(means, spreads, strict=True)]
            best = [int(cost.argmin()) for cost in costs]
            total = sum(float(cost.min()) for cost in costs)
            chosen = np.log(np.array([pairs[at] for at in best])).T.ravel()
            results.append((total, np.array([log_a, math.log(share * least), *chosen])))
    results.sort(key=lambda one: one[0])
    return [start for _, start in results[:_STARTS]]
