"""A matrix of low rank.

Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.compress.packing import check_tensors


@part
class PowerSgd:
    """Send two thin factors of the vector as a nearly square matrix.

    The start of the power iteration is drawn from the key, so nothing is kept between vectors. The
    left factor is orthonormal, so the product is a projection, which never adds to the error.

    Args:
        rank: columns of each factor; at most half the rows of the matrix, beyond which the factors
            would have more numbers than the vector.
        iterations: of the power method.
    """

    rank: Annotated[int, Ge(1)] = 4
    iterations: Annotated[int, Ge(1)] = 1

    kind: ClassVar = "contractive"

    def omega(self, size: int) -> float:
        """A random subspace has rank / rows of a matrix in the mean; this one has more."""
        rows, _, rank = self._shape(size)
        return rows / rank

    def bits(self, size: int) -> int:
        """Of both factors."""
        rows, columns, rank = self._shape(size)
        return 32 * rank * (rows + columns)

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """Factors float32 [rows, rank] and [columns, rank]."""
        rows, columns, rank = self._shape(len(x))
        padded = np.zeros(rows * columns, np.float32)
        padded[: len(x)] = x
        matrix = padded.reshape(rows, columns)
        right = generator(key, purpose="start of the power method").standard_normal(
            (columns, rank), np.float32
        )
        for _ in range(self.iterations):
            left = np.linalg.qr(matrix @ right)[0]
            right = matrix.T @ left
        return {"left": np.ascontiguousarray(left), "right": np.ascontiguousarray(right)}

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """Their product."""
        rows, columns, rank = self._shape(size)
        check_tensors(
            tensors,
            {"left": ("float32", (rows, rank)), "right": ("float32", (columns, rank))},
        )
        product = tensors["left"] @ tensors["right"].T
        return np.ascontiguousarray(product.reshape(-1)[:size], np.float32)

    def _shape(self, size: int) -> tuple[int, int, int]:
        """Rows; columns, at least as many as rows; rank."""
        rows = max(1, math.isqrt(size))
        return rows, -(-size // rows), min(self.rank, max(1, rows // 2))
