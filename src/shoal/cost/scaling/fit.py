"""The one fitter: weighted least squares on the logarithm of the error.

Levenberg and Marquardt's method for many problems at once: every start and every
bootstrap replicate is a row of one array, so intervals cost little more than the fit.
Replicates add noise of the residuals' size to the fitted curve; its scale is drawn anew
for each from its own uncertainty (chi-squared), which gives intervals of few points the
width of Student's. Randomness is counter-based: the same points, the same intervals.

Sources: Marquardt, 1963; Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
section 6.5 (parametric bootstrap); Burnham and Anderson, 2002, section 2.4 (AICc).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import DataError
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.cost.scaling.curve import CurvePoint, checked
from shoal.ir import Interval

if TYPE_CHECKING:
    from shoal.cost.scaling.protocols import Law

REPLICATES = 200
_STEPS = 60
# Theta holds logarithms; beyond these a parameter is zero or infinite for every purpose.
_BOUND = 80.0


class FittedLaw(Value):
    """A law with its parameters, their 95 % intervals, and what it left unexplained.

    Args:
        parameters: name -> value with its 95 % interval.
        samples: bootstrap parameter sets, in the order of the law's names.
        sigma: standard deviation of the residuals of log value.
        r2: share of the variance of log value explained.
        aicc: corrected Akaike's criterion; smaller is better.
        num_points: points fitted.
        smallest: smallest size fitted.
        largest: largest size fitted.
    """

    law: Choice
    parameters: dict[str, Interval]
    samples: tuple[tuple[float, ...], ...] = ()
    sigma: float
    r2: float
    aicc: float | None
    num_points: int
    smallest: float
    largest: float

    def _law(self) -> Law:
        law: Law = table("law").build(self.law)
        return law

    def _thetas(self) -> np.ndarray:
        law = self._law()
        values = {name: interval.value for name, interval in self.parameters.items()}
        rows = [law.theta(values), *(np.asarray(sample) for sample in self.samples)]
        return np.stack(rows)

    def predict(self, size: float, *, model: float | None = None) -> Interval:
        """The law's value at a size, with the 95 % interval of a further measurement."""
        law = self._law()
        x = np.array([[size]] if law.inputs == 1 else [[model or 0.0, size]], dtype=float)
        logs = law.log_value(self._thetas(), x)[:, 0]
        noise = generator(0, purpose="scaling.predict").standard_normal(len(logs) - 1)
        spread = logs[1:] + self.sigma * noise if len(logs) > 1 else logs
        low, high = np.quantile(spread, [0.025, 0.975], method="weibull")
        value = float(np.exp(logs[0]))
        return Interval(
            value=value, low=min(value, float(np.exp(low))), high=max(value, float(np.exp(high)))
        )

    def curve(self, sizes: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
        """Value, low and high of the law itself at each size, for a picture."""
        law = self._law()
        logs = law.log_value(self._thetas(), np.asarray(sizes, dtype=float)[:, None])
        low, high = np.quantile(logs, [0.025, 0.975], axis=0, method="weibull")
        return (
            np.exp(logs[0]).tolist(),
            np.exp(np.minimum(low, logs[0])).tolist(),
            np.exp(np.maximum(high, logs[0])).tolist(),
        )

    def invert(self, target: float) -> Interval | None:
        """The size at which the law reaches ``target``; None if it never does."""
        law = self._law()
        results = [invert(law, theta, target) for theta in self._thetas()]
        if results[0] is None:
            return None
        # A replicate whose floor is above the target never reaches it.
        reached = [math.inf if size is None else size for size in results]
        low, high = np.quantile(np.minimum(reached, 1e300), [0.025, 0.975], method="weibull")
        return Interval(value=results[0], low=min(results[0], low), high=max(results[0], high))


def invert(law: Law, theta_p: np.ndarray, target: float) -> float | None:
    """The size where a one-input law has the value ``target``, by bisection on log size."""
    goal = math.log(target)
    sign = 1.0 if law.increasing else -1.0

    def beyond(log_size: float) -> bool:
        value = law.log_value(theta_p[None], np.array([[math.exp(log_size)]]))[0, 0]
        return bool(sign * (value - goal) >= 0)

    low, high = 0.0, math.log(1e30)
    if not beyond(high):
        return None
    if beyond(low):
        return 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return math.exp(high)


def _solve(
    law: Law, starts_Rp: np.ndarray, x_nk: np.ndarray, logs_Rn: np.ndarray, w_n: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Least-squares parameters [R, p] and their weighted squared residuals [R]."""
    theta = starts_Rp.copy()
    rows, p = theta.shape
    root_n = np.sqrt(w_n)
    damping = np.full(rows, 1e-3)

    def residual(at: np.ndarray, which: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            result = (law.log_value(at, x_nk) - logs_Rn[which]) * root_n
        return np.asarray(np.nan_to_num(result, nan=1e6, posinf=1e6, neginf=-1e6))

    r = residual(theta, np.arange(rows))
    cost = (r**2).sum(-1)
    active = np.arange(rows)
    for _ in range(_STEPS):
        at, r_at = theta[active], r[active]
        jacobian = np.empty((len(active), len(w_n), p))
        for i in range(p):
            moved = at.copy()
            moved[:, i] += 1e-6
            jacobian[:, :, i] = (residual(moved, active) - r_at) / 1e-6
        normal = np.matmul(jacobian.transpose(0, 2, 1), jacobian)
        slope = np.matmul(jacobian.transpose(0, 2, 1), r_at[:, :, None])
        diagonal = np.einsum("rii->ri", normal)
        # A parameter that has no effect (a floor far below) must not make it singular.
        normal = normal + np.eye(p) * ((damping[active, None] * diagonal) + 1e-12)[:, None, :]
        step = np.clip(-np.linalg.solve(normal, slope)[:, :, 0], -3.0, 3.0)
        tried = np.clip(at + step, -_BOUND, _BOUND)
        r_tried = residual(tried, active)
        cost_tried = (r_tried**2).sum(-1)
        better = cost_tried < cost[active]
        gain = cost[active] - cost_tried
        done = (np.abs(step).max(-1) < 1e-7) | (better & (gain <= 1e-9 * cost[active]))
        kept = active[better]
        theta[kept], r[kept], cost[kept] = tried[better], r_tried[better], cost_tried[better]
        damping[active] = np.clip(
            np.where(better, damping[active] / 8, damping[active] * 6), 1e-12, 1e9
        )
        active = active[~(done | (damping[active] >= 1e8))]
        if not len(active):
            break
    return theta, cost


def fit(
    law: Choice | str, points: Sequence[CurvePoint], *, seed: int = 0, replicates: int = REPLICATES
) -> FittedLaw:
    """Fit one law.

    Args:
        law: name of the law, with options.
        points: the curve.
        seed: of the bootstrap.
        replicates: bootstrap replicates; 0 for no intervals.

    Raises:
        DataError: the points cannot be fitted (see :func:`~.curve.checked`).
        UnknownPartError: there is no such law.
    """
    choice = law if isinstance(law, Choice) else Choice(name=law)
    part: Law = table("law").build(choice)
    x_nk, y_n, w_n = checked(
        points, minimum=part.min_points, inputs=part.inputs, increasing=part.increasing
    )
    logs_n = np.log(y_n)
    starts = part.starts(x_nk, y_n)
    theta, cost = _solve(part, starts, x_nk, np.tile(logs_n, (len(starts), 1)), w_n)
    best = int(np.argmin(cost))
    best_p, rss = theta[best], float(cost[best])
    if not np.all(np.isfinite(best_p)):
        raise DataError(f"law {choice}: no fit was found; look at the points for slipped units")
    n, p = len(y_n), theta.shape[1]
    freedom = max(1, n - p)
    sigma = math.sqrt(rss / freedom)
    samples = _bootstrap(part, best_p, x_nk, w_n, sigma, freedom, seed, replicates)
    total = float((w_n * (logs_n - np.average(logs_n, weights=w_n)) ** 2).sum())
    names = part.values(best_p)
    intervals = {}
    drawn = [part.values(sample) for sample in samples]
    for name, value in names.items():
        spread = np.array([row[name] for row in drawn]) if drawn else np.array([value])
        low, high = np.quantile(spread, [0.025, 0.975], method="weibull")
        intervals[name] = Interval(
            value=value, low=min(value, float(low)), high=max(value, float(high))
        )
    parameters_counted = p + 1  # the noise is one more
    correction = n - parameters_counted - 1
    aicc = None
    if correction > 0:
        aicc = (
            n * math.log(max(rss, 1e-300) / n)
            + 2 * parameters_counted
            + 2 * parameters_counted * (parameters_counted + 1) / correction
        )
    return FittedLaw(
        law=choice,
        parameters=intervals,
        samples=tuple(tuple(map(float, sample)) for sample in samples),
        sigma=sigma,
        r2=1.0 - rss / total if total > 0 else 1.0,
        aicc=aicc,
        num_points=n,
        smallest=float(x_nk[:, -1].min()),
        largest=float(x_nk[:, -1].max()),
    )


def _bootstrap(
    law: Law,
    best_p: np.ndarray,
    x_nk: np.ndarray,
    w_n: np.ndarray,
    sigma: float,
    freedom: int,
    seed: int,
    replicates: int,
) -> np.ndarray:
    if not replicates:
        return np.empty((0, len(best_p)))
    random = generator(seed, purpose="scaling.bootstrap")
    scale_R = sigma * np.sqrt(freedom / random.chisquare(freedom, replicates))
    noise = random.standard_normal((replicates, len(w_n))) / np.sqrt(w_n)
    logs_Rn = law.log_value(best_p[None], x_nk) + scale_R[:, None] * noise
    # Two starts each: where the curve lies, and a little aside, lest a flat direction hold.
    near = np.tile(best_p, (replicates, 1))
    aside = near + 0.3 * random.standard_normal(near.shape)
    theta, cost = _solve(
        law, np.concatenate([near, aside]), x_nk, np.concatenate([logs_Rn, logs_Rn]), w_n
    )
    first = cost[:replicates] <= cost[replicates:]
    return np.where(first[:, None], theta[:replicates], theta[replicates:])
