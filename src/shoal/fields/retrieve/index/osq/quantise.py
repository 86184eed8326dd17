"""Scalar quantisers: how many bits each dimension gets, and where its cells end."""

from __future__ import annotations

import numpy as np

MOST_BITS = 8
"""Of a dimension of vectors."""

_ROUNDS = 10


def allocate_bits(energies: np.ndarray, budget: int) -> np.ndarray:
    """Bits of each dimension, uint8 [d].

    A bit goes to the dimension with the largest remaining energy and divides that by 4, as it
    halves the cells. A dimension without energy gets none.

    Args:
        energies: float [d], variances.
        budget: bits of a row; what 8 bits for each dimension leave over is not given out.
    """
    left = np.maximum(np.asarray(energies, np.float64), 0)
    bits = np.zeros(len(left), np.uint8)
    for _ in range(budget):
        best = int(left.argmax())
        if left[best] <= 0:
            break
        bits[best] += 1
        left[best] = left[best] / 4 if bits[best] < MOST_BITS else 0
    return bits


def cell_bounds(values: np.ndarray, cells: int) -> np.ndarray:
    """The ``cells - 1`` inner bounds of cells, ascending, of the type of the values.

    They start at equal counts and are moved by Lloyd's algorithm in one dimension. A code is the
    number of bounds that are not above a value.

    Args:
        values: [n], sorted, n at least 1.
        cells: how many.
    """
    if cells < 2:
        return values[:0].copy()
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    bounds = values[np.arange(1, cells) * len(values) // cells].astype(np.float64)
    for _ in range(_ROUNDS):
        ends = np.concatenate([[0], np.searchsorted(values, bounds), [len(values)]])
        counts = np.diff(ends)
        # The centre of an empty cell is its lower bound.
        empty = np.concatenate([[values[0]], bounds])
        centres = np.where(counts, np.diff(sums[ends]) / np.maximum(counts, 1), empty)
        moved = (centres[1:] + centres[:-1]) / 2
        if np.array_equal(moved, bounds):
            break
        bounds = moved
    return np.maximum.accumulate(bounds.astype(values.dtype))
