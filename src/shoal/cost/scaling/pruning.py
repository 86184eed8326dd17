"""Learning from pruned data, in theory: how far error falls when hard or easy examples are kept.

A student perceptron learns from P = alpha_total N Gaussian examples of dimension N that a teacher
has labelled. Of these the fraction ``keep`` stays whose margin to the teacher is smallest (hard) or
largest (easy), and the student takes the largest margin on what stays. In the limit of large N two
equations give its overlap R with the teacher and its margin kappa; its error is arccos(R) / pi.
With all examples error falls as 1 / alpha; with the best share of hard ones it falls faster than
any power.

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022, sections 2 and appendix A (perfect teacher). With x = (kappa - R z) / s, s = sqrt(1 - R^2) and
the kept teacher margins z in (a, b), integrating the student's margin first gives the equations as
integrals of positive functions of z alone, which are summed as logarithms here.

*Differs*: the paper has the hard side only; the easy side is the same equations with another (a,
b).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from shoal.core.errors import ConfigError, require
from shoal.core.random import generator

Side = Literal["hard", "easy"]
"""Which examples are kept: those with the smallest, or the largest, margin to the teacher."""

SIDES: tuple[Side, ...] = ("hard", "easy")

LEAST_KEEP = 0.1
"""The smallest share that the envelope and the advice consider, as in the paper's figures."""

# Examples for each dimension beyond which nothing about the advice changes.
_PLENTY = 100.0
_RESIDUAL = 1e-9
_FIRST_ALPHA = 0.05
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_STEPS = np.array([-30, -9, -3, 0, 3, 9, 38], float)
_HALF_LOG_TAU = 0.5 * math.log(2 * math.pi)

_Floats = npt.NDArray[np.float64]


class StudentState(NamedTuple):
    """What the theory says of a student.

    Args:
        overlap: R, cosine between student and teacher.
        margin: kappa, of the student on what was kept, over its norm.
        error: share of new examples that it gets wrong.
        residual: largest relative error of the two equations.
    """

    overlap: float
    margin: float
    error: float
    residual: float


def kept_margins(keep: float, side: Side = "hard") -> tuple[float, float]:
    """The interval of teacher margins that keeps a share of the examples.

    Raises:
        ConfigError: the share is not in (0, 1], or no margin keeps it.
    """
    require(0 < keep <= 1, "keep", keep, expected="a number in (0, 1]")
    if side == "hard":
        low, high = 0.0, float(special.ndtri((1 + keep) / 2)) if keep < 1 else math.inf
    else:
        low, high = -float(special.ndtri(keep / 2)) if keep < 1 else 0.0, math.inf
    if not low < high:
        raise ConfigError(f"keep = {keep:g}: no interval of margins has so few; keep more")
    return low, high


@functools.lru_cache(maxsize=4096)
def student(alpha_total: float, keep: float = 1.0, side: Side = "hard") -> StudentState:
    """The student of a pruned set.

    Args:
        alpha_total: examples for each dimension, before pruning.
        keep: share of them that is kept, (0, 1].
        side: which.

    Raises:
        ConfigError: a number that cannot be, or the equations have no solution in floating point.
    """
    require(0 < alpha_total < math.inf, "alpha_total", alpha_total, expected="above 0")
    kept_margins(keep, side)
    if keep < 1:
        begin, end = (math.log(alpha_total), 0.0), (math.log(alpha_total), math.log(keep))
        whole = student(alpha_total)
        first = np.array([_angle_of(whole.error), math.log(whole.margin)])
    else:
        alpha = min(alpha_total, _FIRST_ALPHA)
        begin, end = (math.log(alpha), 0.0), (math.log(alpha_total), 0.0)
        overlap = math.sqrt(2 * alpha / math.pi)  # of few examples, to first order
        first = np.array([0.5 * math.log(1 / overlap**2 - 1), -0.5 * math.log(alpha)])
    found, residual = _follow(first, begin, end, side)
    angle = math.atan(math.exp(found[0]))
    return StudentState(math.cos(angle), math.exp(found[1]), angle / math.pi, residual)


def _angle_of(error: float) -> float:
    return math.log(math.tan(error * math.pi))


def _follow(
    first: _Floats, begin: tuple[float, float], end: tuple[float, float], side: Side
) -> tuple[_Floats, float]:
    """Solve along a line of (log alpha_total, log keep), each from the solution before."""
    start, way = np.array(begin), np.subtract(end, begin)
    length = float(np.abs(way).max())
    state, at, step = first, 0.0, 1.0 if length == 0 else min(1.0, 0.5 / length)
    residual = math.inf
    while at < 1 or residual == math.inf:
        to = min(1.0, at + step) if residual < math.inf else at
        alpha, keep = np.exp(start + to * way)
        interval = kept_margins(min(float(keep), 1.0), side)
        answer = optimize.root(_equations, state, args=(float(alpha), interval), tol=1e-13)
        off = float(np.abs(_equations(answer.x, float(alpha), interval)).max())
        if off < _RESIDUAL:
            state, at, residual, step = answer.x, to, off, step * 1.5
            continue
        step /= 2
        if residual == math.inf or step * length < 1e-4:
            raise ConfigError(
                f"alpha_total = {alpha:g}, keep = {keep:g}: the equations are not solved in "
                f"floating point (residual {off:.1g}); keep more of fewer examples"
            )
    return state, residual


def _equations(unknown: _Floats, alpha_total: float, interval: tuple[float, float]) -> _Floats:
    """Logarithms of right over left side of both equations; unknown: log tan(angle), log kappa."""
    # tan(angle) is s / R; steps that leave what floats can hold come back.
    tangent, kappa = np.exp(np.clip(unknown, -200.0, 200.0))
    angle = math.atan(tangent)
    overlap, s = math.cos(angle), math.sin(angle)
    z, log_weight = _quadrature(*interval, kappa / max(overlap, 1e-300), tangent)
    x = np.clip((kappa - overlap * z) / s, -1e8, 1e8)
    base = log_weight - 0.5 * z**2 - _HALF_LOG_TAU + math.log(2 * alpha_total)
    far, cosine = np.log(s * z) + _log_ramp(x), math.log(max(overlap, 1e-300))
    log_first = _log_sum(base + np.logaddexp(far, cosine + special.log_ndtr(x)))
    return np.array([log_first - cosine, _log_sum(base + _log_square(x))])


def _log_sum(logs: _Floats) -> float:
    most = float(logs.max())
    return most + math.log(np.exp(logs - most).sum())


def _quadrature(low: float, high: float, middle: float, scale: float) -> tuple[_Floats, _Floats]:
    """Nodes and logarithms of weights, dense where x changes its sign.

    Args:
        low: of the interval.
        high: of the interval.
        middle: where x is 0.
        scale: of z, over which x changes by 1.
    """
    # Beyond these a normal density, or the integrands' own, are below every float.
    high = min(high, low + 9.0)
    edges = np.concatenate([np.linspace(low, high, 6), middle + scale * _STEPS])
    edges = np.unique(np.clip(edges, low, high))
    half = np.diff(edges)[:, None] / 2
    nodes = edges[:-1, None] + half * (1 + _NODES)
    return nodes.ravel(), np.log(half * _WEIGHTS).ravel()


def _log_ramp(x: _Floats) -> _Floats:
    """Logarithm of E max(0, x - t) for a standard normal t."""
    tail, y = _mills(x), np.maximum(-x, 0.0)
    near = np.log(np.maximum(1 - y * tail, 1e-300))
    far = -2 * np.log(np.maximum(y, 1.0)) + np.log1p(-3 / np.maximum(y, 10.0) ** 2)
    below = -0.5 * x**2 - _HALF_LOG_TAU + np.where(y < 50, near, far)
    positive = np.maximum(x, 0.0)
    density = np.exp(-0.5 * positive**2 - _HALF_LOG_TAU)
    return np.where(x < 0, below, np.log(density + positive * special.ndtr(positive)))


def _log_square(x: _Floats) -> _Floats:
    """Logarithm of E max(0, x - t)^2 for a standard normal t."""
    tail, y = _mills(x), np.maximum(-x, 0.0)
    near = np.log(np.maximum((1 + y**2) * tail - y, 1e-300))
    far = math.log(2) - 3 * np.log(np.maximum(y, 1.0)) + np.log1p(-6 / np.maximum(y, 10.0) ** 2)
    below = -0.5 * x**2 - _HALF_LOG_TAU + np.where(y < 50, near, far)
    positive = np.maximum(x, 0.0)
    density = np.exp(-0.5 * positive**2 - _HALF_LOG_TAU)
    above = np.log((1 + positive**2) * special.ndtr(positive) + positive * density)
    return np.where(x < 0, below, above)


def _mills(x: _Floats) -> _Floats:
    """Normal tail over density at -x, where x is negative."""
    return np.asarray(math.sqrt(math.pi / 2) * special.erfcx(np.maximum(-x, 0.0) / math.sqrt(2)))


def envelope(alpha: float) -> tuple[float, StudentState]:
    """The best share to keep where so many examples are kept, and the student of it.

    Args:
        alpha: examples for each dimension, after pruning; the pool has ``alpha / keep``.

    Returns:
        The share, from :data:`LEAST_KEEP` to 1, and its student.
    """

    def error(log_keep: float) -> float:
        keep = math.exp(log_keep)
        return math.log(student(alpha / keep, keep).error)

    grid = np.linspace(math.log(LEAST_KEEP), 0.0, 7)
    errors = [error(float(at)) for at in grid]
    best = int(np.argmin(errors))
    ends = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)])
    inside = optimize.minimize_scalar(error, bounds=ends, method="bounded", options={"xatol": 0.01})
    chosen = float(inside.x) if inside.fun < errors[best] else float(grid[best])
    keep = math.exp(chosen)
    return keep, student(alpha / keep, keep)


@functools.lru_cache(maxsize=256)
def best_keep(alpha_total: float) -> float:
    """The share of a pool that is on the envelope: no other pool gives so many kept examples more.

    Args:
        alpha_total: examples for each dimension in the pool.

    Returns:
        From :data:`LEAST_KEEP` to 1; 1 where hard examples help nothing.
    """

    def larger_pool_helps(log_keep: float) -> bool:
        # The same number of kept examples, drawn from a slightly larger pool.
        keep, fewer = math.exp(log_keep), math.exp(log_keep - 0.02)
        other = student(alpha_total * keep / fewer, fewer)
        return other.error < student(alpha_total, keep).error

    low, high = math.log(LEAST_KEEP), 0.0
    if not larger_pool_helps(high):
        return 1.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (low, middle) if larger_pool_helps(middle) else (middle, high)
    return math.exp((low + high) / 2)


class PruneAdvice(NamedTuple):
    """Which examples to keep, and what the theory expects of it.

    Args:
        side: ``hard`` or ``easy``.
        keep: share.
        error: of a student of what is kept.
        error_random: of as many examples at random.
        error_all: of all examples.
    """

    side: Side
    keep: float
    error: float
    error_random: float
    error_all: float


@dataclass(frozen=True)
class PruneAdvisor:
    """Hard or easy, and how many: what the perceptron's theory says of n examples of dimension d.

    Args:
        n: examples.
        d: dimension of what is learned: numbers of a vector, of a linear student.
    """

    n: int
    d: int

    def __post_init__(self) -> None:
        require(self.n >= 1, "PruneAdvisor.n", self.n, expected="at least 1")
        require(self.d >= 1, "PruneAdvisor.d", self.d, expected="at least 1")

    @property
    def alpha_total(self) -> float:
        """Examples for each dimension, at most a hundred: more change nothing here."""
        return min(self.n / self.d, _PLENTY)

    def advise(self, keep: float | None = None) -> PruneAdvice:
        """Which side to keep.

        Args:
            keep: the share that has to be kept; None for the share on the envelope.

        Raises:
            ConfigError: keep is not in (0, 1].
        """
        share = best_keep(self.alpha_total) if keep is None else keep
        errors = {side: student(self.alpha_total, share, side).error for side in SIDES}
        side: Side = "hard" if errors["hard"] <= errors["easy"] else "easy"
        return PruneAdvice(
            side=side,
            keep=share,
            error=errors[side],
            error_random=student(share * self.alpha_total).error,
            error_all=student(self.alpha_total).error,
        )


def simulated_error(
    alpha_total: float,
    keep: float = 1.0,
    *,
    dim: int = 150,
    side: Side = "hard",
    angle: float = 0.0,
    seed: int = 0,
) -> float:
    """Error of a student that is really trained on a pruned set.

    Args:
        alpha_total: examples for each dimension, before pruning.
        keep: share that is kept.
        dim: dimension N.
        side: which are kept.
        angle: between the teacher and the probe whose margins rank the examples, in radians; the
            theory above is for 0.
        seed: of the examples.
    """
    kept_margins(keep, side)
    draw = generator(seed, purpose="pruning simulation")
    X = draw.standard_normal((round(alpha_total * dim), dim))
    probe = math.cos(angle) * X[:, 0] + math.sin(angle) * X[:, 1]
    order = np.argsort(np.abs(probe))
    count = max(1, round(keep * len(X)))
    chosen = order[:count] if side == "hard" else order[-count:]
    weights = max_margin(X[chosen] * np.sign(X[chosen, :1]))
    return math.acos(float(np.clip(weights[0], -1.0, 1.0))) / math.pi


def max_margin(X: _Floats) -> _Floats:
    """The direction with the largest smallest product with the rows of X, of length 1.

    Source: Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23 (least distance
    programming by non-negative least squares).
    """
    system = np.vstack([X.T, np.ones(len(X))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, _ = optimize.nnls(system, target, maxiter=30 * len(X))
    direction = X.T @ weights
    return np.asarray(direction / np.linalg.norm(direction))
