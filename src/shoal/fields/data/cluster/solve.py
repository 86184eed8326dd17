"""Solving a problem of any size with any method: the sizes that need no search, and the labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.fields.data.cluster.clara import to_medoids
from shoal.fields.data.cluster.protocols import (
    Clusterer,
    ClusterError,
    ClusteringProblem,
    ClusteringResult,
)
from shoal.fields.data.cluster.search import Ids

# Numbers of one block of rows.
_BLOCK = 4_000_000


@dataclass(frozen=True)
class ClusteringSolution:
    """Medoids, with every object's place among them.

    Args:
        result: where the search ended.
        labels: int64 [n].
        nearest: float32 [n], dissimilarity to the medoid.
        loss: sum of ``nearest``, recomputed.
    """

    result: ClusteringResult
    labels: Ids
    nearest: np.ndarray
    loss: float


def check_k(k: int, n: int) -> None:
    """Refuse a number of clusters that there cannot be.

    Raises:
        ClusterError: it is below 1 or above n.
    """
    if not 1 <= k <= n:
        raise ClusterError(
            f"n_clusters = {k}: expected 1 to {n}, the number of objects (n_samples = {n})"
        )


def solve(method: Clusterer, problem: ClusteringProblem) -> ClusteringSolution:
    """Find medoids, and assign every object.

    Raises:
        ClusterError: k is below 1 or above n; there is not enough memory.
    """
    n, k = problem.objects.n, problem.k
    check_k(k, n)
    if k == n:
        clustering_result = ClusteringResult(np.arange(n), 0.0, 0, 0)
    elif k == 1:
        clustering_result = _middle(problem)
    else:
        clustering_result = method.search(problem)
    labels, nearest = to_medoids(problem.objects, clustering_result.medoids)
    labels[clustering_result.medoids] = np.arange(
        k
    )  # a medoid is of its own cluster, even at a tie
    return ClusteringSolution(
        clustering_result, labels, nearest, float(nearest.sum(dtype=np.float64))
    )


def _middle(problem: ClusteringProblem) -> ClusteringResult:
    """The one medoid: the object with the least sum, of all."""
    objects, sums = problem.objects, np.empty(problem.objects.n)
    step = max(1, _BLOCK // objects.n)
    for first in range(0, objects.n, step):
        rows = slice(first, first + step)
        sums[rows] = objects.between(rows, slice(None)).sum(axis=1, dtype=np.float64)
    best = int(sums.argmin())
    return ClusteringResult(np.array([best]), float(sums[best]), 0, 1)
