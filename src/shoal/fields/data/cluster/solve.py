"""Solving a problem of any size with any method: the sizes that need no search, and the labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.cluster.protocols import (
    ClusterError,
    Clustering,
    ClusteringProblem,
    ClusteringResult,
    MedoidSearcher,
)
from shoal.fields.data.cluster.search import Ids
from shoal.fields.data.cluster.storage import Objects

BLOCK = 4_000_000
"""Numbers of one block of rows."""


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


def solve(method: MedoidSearcher, problem: ClusteringProblem) -> ClusteringSolution:
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
    step = max(1, BLOCK // objects.n)
    for first in range(0, objects.n, step):
        rows = slice(first, first + step)
        sums[rows] = objects.between(rows, slice(None)).sum(axis=1, dtype=np.float64)
    best = int(sums.argmin())
    return ClusteringResult(np.array([best]), float(sums[best]), 0, 1)


def to_medoids(objects: Objects, medoids: Ids) -> tuple[Ids, np.ndarray]:
    """Of every object, the place of its nearest medoid [n], and its dissimilarity [n].

    Args:
        objects: which are read by blocks; nothing of n² is kept.
        medoids: int64 [k].
    """
    labels, nearest = np.empty(objects.n, np.int64), np.empty(objects.n, np.float32)
    step = max(1, BLOCK // len(medoids))
    for first in range(0, objects.n, step):
        rows = slice(first, min(first + step, objects.n))
        to = objects.between(medoids, rows).T
        labels[rows] = to.argmin(axis=1)
        nearest[rows] = np.take_along_axis(to, labels[rows, None], 1)[:, 0]
    return labels, nearest


@part
class MedoidMethod(ABC):
    """Base of the methods that find medoids."""

    finds_k: ClassVar[bool] = False
    assumes: ClassVar[str] = (
        "passes, swaps and the loss over FasterPAM's are assumed from runs on descriptors of "
        "photographs, 1,000 to 8,000 objects"
    )

    @abstractmethod
    def search(self, problem: ClusteringProblem) -> ClusteringResult:
        """Find medoids."""

    def cluster(self, problem: ClusteringProblem) -> Clustering:
        """Find medoids, and assign every object to the nearest.

        Raises:
            ClusterError: k is below 1 or above n; there is not enough memory.
        """
        solution = solve(self, problem)
        result = solution.result
        medoids = np.asarray(result.medoids)
        sizes = np.bincount(solution.labels, minlength=len(medoids)).tolist()
        return Clustering(
            labels=solution.labels,
            measured={
                "loss": solution.loss,
                "swaps": float(result.swaps),
                "passes": float(result.passes),
            },
            what="medoid",
            names=[str(medoid) for medoid in medoids],
            columns={
                "medoid": medoids[solution.labels],
                "dissimilarity": solution.nearest,
            },
            files={
                "medoids.json": {
                    "medoids": medoids.tolist(),
                    "loss": solution.loss,
                    "sizes": sizes,
                }
            },
            converged=result.converged,
            details={"medoids": medoids.tolist()},
        )
