"""The (n, s) gradient code: any n - s of n results add up to the whole gradient.

Source: Tandon, Lei, Dimakis, Karampatziakis, Gradient Coding: Avoiding Stragglers in Distributed
Learning, 2017.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from shoal.core.random import generator

# Random constructions, of which the one with the smallest weights is taken.
_DRAWS = 16


class GradientCode:
    """Weights of n chunks at n workers.

    Where s + 1 divides n, groups of s + 1 workers have the same s + 1 chunks, each with weight 1.
    Otherwise worker i has chunks i ... i + s, cyclically, with weights from a random null space.

    Args:
        workers: n.
        stragglers: s.
    """

    def __init__(self, workers: int, stragglers: int) -> None:
        self.needed = workers - stragglers
        self.matrix = _matrix(workers, stragglers)

    def parts(self, worker: int) -> tuple[tuple[int, float], ...]:
        """Chunks of a worker with their weights."""
        row = self.matrix[worker]
        return tuple((int(chunk), float(row[chunk])) for chunk in np.flatnonzero(row))

    def decode(self, workers: Sequence[int]) -> np.ndarray:
        """Weight of the result of each of at least n - s workers; float64."""
        rows = self.matrix[list(workers)]
        ones = np.ones(len(self.matrix))
        weights, *_ = np.linalg.lstsq(rows.T, ones, rcond=None)
        assert np.abs(weights @ rows - ones).max() < 1e-6
        return np.asarray(weights)


@functools.cache
def _matrix(workers: int, stragglers: int) -> np.ndarray:
    """Weights float64 [worker, chunk]."""
    width = stragglers + 1
    if workers % width == 0:
        of_group = np.arange(workers) // width
        return np.asarray(of_group[:, None] == of_group, np.float64)
    draws = [_drawn(workers, width, at) for at in range(_DRAWS)]
    return min(draws, key=lambda one: float(np.abs(one).max()))


def _drawn(workers: int, width: int, at: int) -> np.ndarray:
    """Rows of a random null space that has the vector of ones in it."""
    draw = generator(at, purpose="gradient code")
    space = draw.standard_normal((width - 1, workers))
    space[:, -1] = -space[:, :-1].sum(1)
    matrix = np.zeros((workers, workers))
    for worker in range(workers):
        mine = (worker + np.arange(width)) % workers
        matrix[worker, mine[0]] = 1.0
        matrix[worker, mine[1:]] = -np.linalg.solve(space[:, mine[1:]], space[:, mine[0]])
    return matrix
