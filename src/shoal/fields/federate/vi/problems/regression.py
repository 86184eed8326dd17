"""Linear regression that withstands a perturbation of its features.

Source: Beznosikov et al., Distributed Methods with Compressed Communication for Solving
Variational Inequalities, with Theoretical Guarantees, 2022 (robust linear regression).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.random import generator


@part
class RobustRegression:
    """min over w, max over r in a ball: mean of (w'(x + r) - y)^2 / 2, with quadratic terms.

    One r is added to all rows. Its term is large enough that the maximum is unique.

    Args:
        features: of a row; z has twice as many numbers.
        rows: of each worker.
        radius: of the ball.
        ridge: weight of half the squared length of w.
        penalty: weight of half the squared length of r, which is subtracted.
        offset: added to y, which no weight explains; the adversary makes it worse.
        noise: deviation of y.
    """

    features: Annotated[int, Ge(1)] = 20
    rows: Annotated[int, Ge(1)] = 100
    radius: Annotated[float, Gt(0)] = 0.1
    ridge: Annotated[float, Gt(0)] = 0.1
    penalty: Annotated[float, Gt(0)] = 2.0
    offset: float = 1.0
    noise: Annotated[float, Ge(0)] = 0.1

    def build(self, workers: int, seed: int) -> RegressionOperator:
        """Rows of each worker have a mean of their own."""
        draw = generator(seed, purpose="robust regression")
        truth = draw.standard_normal(self.features) / np.sqrt(self.features)
        means = 0.5 * draw.standard_normal((workers, 1, self.features))
        x = means + draw.standard_normal((workers, self.rows, self.features))
        y = x @ truth + self.offset + self.noise * draw.standard_normal((workers, self.rows))
        return RegressionOperator(self, x, y)


class RegressionOperator:
    """F(w, r) of each worker's rows.

    Args:
        problem: its weights and radius.
        x: features [M, N, d].
        y: targets [M, N].
    """

    constrained = True
    constants = None

    def __init__(self, problem: RobustRegression, x: np.ndarray, y: np.ndarray) -> None:
        self._problem, self._x, self._y = problem, x, y
        self.workers, self.size = len(x), 2 * problem.features
        self.flops = 6.0 * x[0].size
        self._first = self._residual(self.start())

    def start(self) -> np.ndarray:
        """Zero."""
        return np.zeros(self.size)

    def value(self, worker: int, z: np.ndarray, sample: np.random.Generator | None) -> np.ndarray:
        """With a sample, a tenth of the rows."""
        x, y = self._x[worker], self._y[worker]
        if sample is not None:
            some = sample.choice(len(y), -(-len(y) // 10), replace=False)
            x, y = x[some], y[some]
        w, r = np.split(z, 2)
        moved = x + r
        error = moved @ w - y
        to_w = moved.T @ error / len(y) + self._problem.ridge * w
        to_r = error.mean() * w - self._problem.penalty * r
        return np.concatenate([to_w, -to_r])

    def prox(self, z: np.ndarray, step: float) -> np.ndarray:
        """The nearest point with r in the ball."""
        w, r = np.split(z, 2)
        norm = float(np.linalg.norm(r))
        return (
            z
            if norm <= self._problem.radius
            else np.concatenate([w, r * self._problem.radius / norm])
        )

    def error(self, z: np.ndarray) -> float:
        """Squared residual of z = prox(z - F(z)), over that of the start."""
        return self._residual(z) / self._first

    def judge(self, z: np.ndarray) -> dict[str, float]:
        """Nothing else."""
        return {}

    def _residual(self, z: np.ndarray) -> float:
        mean = np.mean([self.value(worker, z, None) for worker in range(self.workers)], axis=0)
        return float(((z - self.prox(z - mean, 1.0)) ** 2).sum())
