"""What a tuner believes about configurations that it has not tried: mean and doubt.

``gp`` is a Gaussian process with a Matern 5/2 kernel and a length scale for each axis, chosen
by likelihood; it needs NumPy alone. ``forest`` is a random forest, whose doubt is the spread of
its trees; it needs scikit-learn.

Sources: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006; Hutter, Hoos and
Leyton-Brown, Sequential Model-based Optimization for General Algorithm Configuration, 2011.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from shoal.core.random import generator
from shoal.cost.gemm.forest import Forest, fit_forest

Kind = Literal["gp", "forest"]
# Length scales, in widths of an axis, and shares of noise that are considered.
SCALES = (0.1, 10.0)
NOISES = (1e-4, 1e-1)
DRAWS = 96


class Surrogate(Protocol):
    """A fitted belief."""

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[N, axes] -> mean [N] and standard deviation [N]."""

    def mean(self, points: np.ndarray) -> np.ndarray:
        """[N, axes] -> mean [N]."""


def _matern(a: np.ndarray, b: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[N, A], [M, A] -> [N, M]."""
    left, right = a / scales, b / scales
    square = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    far = np.sqrt(5 * np.maximum(square, 0.0))
    return np.asarray((1 + far + far**2 / 3) * np.exp(-far))


@dataclass(frozen=True, eq=False)
class GaussianProcess:
    """A posterior over functions.

    Args:
        seen: [N, A] points.
        weights: [N] inverse kernel times standardised values.
        factor: [N, N] Cholesky factor of the kernel with noise.
        scales: [A] length scales.
        middle: mean of the values.
        deviation: standard deviation of the values.
    """

    seen: np.ndarray
    weights: np.ndarray
    factor: np.ndarray
    scales: np.ndarray
    middle: float
    deviation: float

    @classmethod
    def fit(
        cls,
        seen: np.ndarray,
        values: np.ndarray,
        seed: int = 0,
        doubtful: np.ndarray | None = None,
    ) -> GaussianProcess:
        """The process whose length scales and noise make the values most likely.

        Args:
            seen: [N, A] points.
            values: [N] what was seen there.
            seed: seed of the search for them.
            doubtful: [N] further variance of each value, in variances of all.
        """
        mean, deviation = float(values.mean()), float(values.std()) or 1.0
        y = (values - mean) / deviation
        doubt = np.zeros(len(y)) if doubtful is None else doubtful
        axes = seen.shape[1]
        random = generator(seed, purpose="gaussian process", step=len(seen))
        best: tuple[float, np.ndarray, np.ndarray, np.ndarray] | None = None
        centre = np.log(np.append(np.full(axes, 1.0), 1e-3))
        low = np.log(np.append(np.full(axes, SCALES[0]), NOISES[0]))
        high = np.log(np.append(np.full(axes, SCALES[1]), NOISES[1]))
        for draw in range(DRAWS):
            # First anywhere, then around the best.
            if draw == 0:
                request = centre
            elif draw < DRAWS // 2:
                request = random.uniform(low, high)
            else:
                request = np.clip(centre + 0.4 * random.standard_normal(axes + 1), low, high)
            scales, noise = np.exp(request[:-1]), float(np.exp(request[-1]))
            kernel = _matern(seen, seen, scales) + np.diag(noise + 1e-9 + doubt)
            factor = np.linalg.cholesky(kernel)
            weights = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
            likelihood = -0.5 * float(y @ weights) - float(np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0]:
                best, centre = (likelihood, scales, factor, weights), request
        assert best is not None
        _, scales, factor, weights = best
        return cls(seen, weights, factor, scales, mean, deviation)

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cross = _matern(points, self.seen, self.scales)
        solved = np.linalg.solve(self.factor, cross.T)
        doubt = np.sqrt(np.maximum(1.0 - (solved**2).sum(0), 1e-12))
        return self.middle + self.deviation * (cross @ self.weights), self.deviation * doubt

    def mean(self, points: np.ndarray) -> np.ndarray:
        cross = _matern(points, self.seen, self.scales)
        return np.asarray(self.middle + self.deviation * (cross @ self.weights))


@dataclass(frozen=True, eq=False)
class _Trees:
    forest: Forest

    def predict(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        trees = self.forest.trees(points)[:, :, 0]
        return trees.mean(axis=0), np.maximum(trees.std(axis=0), 1e-9)

    def mean(self, points: np.ndarray) -> np.ndarray:
        return self.forest.predict(points)[:, 0]


def fit_surrogate(
    kind: Kind,
    seen: np.ndarray,
    values: np.ndarray,
    seed: int = 0,
    doubtful: np.ndarray | None = None,
) -> Surrogate:
    """Fit a surrogate to values at [N, A] points.

    ``doubtful`` is for gp alone; see :meth:`GaussianProcess.fit`.

    Raises:
        MissingExtraError: a forest without scikit-learn.
    """
    if kind == "gp":
        return GaussianProcess.fit(seen, values, seed, doubtful)
    forest = fit_forest(seen, values[:, None], trees=64, depth=None, features=0.8, seed=seed)
    return _Trees(forest)
