"""A quadratic saddle point: bilinear, with a small quadratic term.

Source: Beznosikov et al., Distributed Methods with Compressed Communication for Solving
Variational Inequalities, with Theoretical Guarantees, 2022 (section 5.1).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.vi.protocols import measured_constants


@part
class QuadraticSaddle:
    """min over x, max over y of x' B y + a' x + b' y + (mu / 2)(|x|^2 - |y|^2), drawn at random.

    Args:
        dimension: of x and y together; half each.
        condition: L / mu, where L is the norm of the mean operator.
        spread: norm of what a worker's B differs from the mean by, over the norm of the mean.
    """

    dimension: Annotated[int, Ge(2)] = 100
    condition: Annotated[float, Gt(1)] = 100.0
    spread: Annotated[float, Ge(0)] = 0.5

    def build(self, workers: int, seed: int) -> QuadraticOperator:
        """Matrices of all workers."""
        half = self.dimension // 2
        draw = generator(seed, purpose="quadratic saddle point")
        bilinear = draw.standard_normal((half, half))
        bilinear /= np.linalg.norm(bilinear, 2)
        noise = draw.standard_normal((workers, half, half))
        noise -= noise.mean(0)
        scale = np.linalg.norm(noise, 2, axis=(1, 2))[:, None, None]
        parts = bilinear + self.spread * noise / np.maximum(scale, 1e-300)
        parts += bilinear - parts.mean(0)
        # L is sqrt(1 + mu^2), since the bilinear part is skew.
        mu = 1 / np.sqrt(self.condition**2 - 1)
        matrices = np.zeros((workers, 2 * half, 2 * half))
        matrices[:, :half, half:] = parts
        matrices[:, half:, :half] = -parts.transpose(0, 2, 1)
        matrices += mu * np.eye(2 * half)
        return QuadraticOperator(matrices, draw.standard_normal((workers, 2 * half)))


class QuadraticOperator:
    """F_m(z) = A_m z + b_m.

    Args:
        matrices: A, float64 [M, n, n].
        offsets: b, float64 [M, n].
    """

    constrained = False

    def __init__(self, matrices: np.ndarray, offsets: np.ndarray) -> None:
        self._matrices, self._offsets = matrices, offsets
        self.workers, self.size = offsets.shape
        self.flops = 2.0 * self.size**2
        self.constants = measured_constants(matrices)
        self.solution = np.linalg.solve(matrices.mean(0), -offsets.mean(0))

    def start(self) -> np.ndarray:
        """Zero."""
        return np.zeros(self.size)

    def value(self, worker: int, z: np.ndarray, sample: np.random.Generator | None) -> np.ndarray:
        """With a sample, half of the columns of A, twice as large."""
        matrix = self._matrices[worker]
        if sample is None:
            return np.asarray(matrix @ z + self._offsets[worker])
        some = sample.choice(self.size, -(-self.size // 2), replace=False)
        scale = self.size / len(some)
        return np.asarray(scale * (matrix[:, some] @ z[some]) + self._offsets[worker])

    def prox(self, z: np.ndarray, step: float) -> np.ndarray:
        """There is no constraint."""
        return z

    def error(self, z: np.ndarray) -> float:
        """Squared distance to the solution, over that of the start."""
        return float(((z - self.solution) ** 2).sum() / (self.solution**2).sum())

    def judge(self, z: np.ndarray) -> dict[str, float]:
        """Nothing else."""
        return {}
