"""Weighted points: rows in an order of their own, each once, and few of them where there are many.

What follows must not depend on the order of the rows, so they are sorted first, and equal rows
become one point with a weight. Very many rows become micro-clusters. Those are chosen without
chance, by taking points at equal steps of what k-means|| draws from.

Source: Bahmani et al., Scalable K-Means++, 2012 (oversampling by squared distance).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]

MOST_POINTS = 20_000
"""Distinct rows up to which all of them are clustered; of more, micro-clusters are."""

MICRO = 4_000
"""Micro-clusters."""

ROUNDS = 3
"""Times that micro-clusters are chosen."""

# Rows whose distances are computed at a time.
_BLOCK = 1024


@dataclass(frozen=True)
class WeightedPoints:
    """Points that stand for rows.

    Args:
        X: float64 [M, D].
        weights: [M], rows that each stands for.
    """

    X: np.ndarray
    weights: np.ndarray

    @property
    def total(self) -> float:
        """Rows."""
        return float(self.weights.sum())

    @cached_property
    def axes(self) -> np.ndarray:
        """[M, min(M, D)] coordinates on the principal axes, the longest first."""
        centred = self.X - np.average(self.X, axis=0, weights=self.weights)
        spread = (centred * self.weights[:, None]).T @ centred
        values, vectors = np.linalg.eigh(spread)
        axes: np.ndarray = centred @ vectors[:, values.argsort()[::-1]]
        return axes

    def take(self, which: Any) -> WeightedPoints:
        """Only these points."""
        return WeightedPoints(self.X[which], self.weights[which])

    def means(self, labels: Ids, k: int) -> WeightedPoints:
        """Of each of k clusters its mean, and its weight; those of an empty one are 0."""
        mass = np.bincount(labels, self.weights, k)
        sums = [np.bincount(labels, self.weights * column, k) for column in self.X.T]
        return WeightedPoints(np.stack(sums, axis=1) / np.maximum(mass, 1e-300)[:, None], mass)


def canonical(X: np.ndarray) -> tuple[np.ndarray, np.ndarray, Ids]:
    """Distinct rows in lexicographic order.

    Returns:
        The rows [U, D], how often each occurs [U], and of every row its place among them [N].
    """
    order = np.lexsort(X.T[::-1])
    ordered = X[order]
    fresh = np.ones(len(X), bool)
    fresh[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    place = np.empty(len(X), np.int64)
    place[order] = np.cumsum(fresh) - 1
    firsts = np.flatnonzero(fresh)
    return ordered[firsts], np.diff(np.append(firsts, len(X))).astype(float), place


def micro_clusters(X: np.ndarray, weights: np.ndarray, count: int) -> tuple[WeightedPoints, Ids]:
    """Few weighted points that stand for many.

    Args:
        X: [U, D], in canonical order.
        weights: [U].
        count: at most how many.

    Returns:
        The points, and of every row the one that stands for it [U].
    """
    each = count // ROUNDS
    chosen = _at_equal_steps(weights, each)
    for number in range(ROUNDS):
        labels, apart = nearest_rows(X, X[chosen])
        if number + 1 < ROUNDS:
            chosen = np.union1d(chosen, _at_equal_steps(weights * apart, each))
    few = WeightedPoints(X, weights).means(labels, len(chosen))
    kept = few.weights > 0
    return few.take(kept), (np.cumsum(kept) - 1)[labels]


def _at_equal_steps(share: np.ndarray, count: int) -> Ids:
    """Places at equal steps of the cumulated share."""
    along = np.cumsum(share)
    steps = (np.arange(count) + 0.5) / count * along[-1]
    return np.unique(np.searchsorted(along, steps)).astype(np.int64)


def nearest_rows(X: np.ndarray, among: np.ndarray) -> tuple[Ids, np.ndarray]:
    """Of every row [U] which of a few is nearest, and its squared distance, in float32.

    BLAS makes this some four times as fast as scikit-learn's ``pairwise_distances_argmin``.
    """
    few = among.astype(np.float32)
    half = np.einsum("ij,ij->i", few, few) / 2
    labels, apart = np.empty(len(X), np.int64), np.empty(len(X))
    for first in range(0, len(X), _BLOCK):
        block = X[first : first + _BLOCK].astype(np.float32)
        near = block @ few.T
        near -= half
        best = near.argmax(axis=1)
        labels[first : first + _BLOCK] = best
        apart[first : first + _BLOCK] = (
            np.einsum("ij,ij->i", block, block) - 2 * near[np.arange(len(best)), best]
        )
    return labels, np.maximum(apart, 0.0)
