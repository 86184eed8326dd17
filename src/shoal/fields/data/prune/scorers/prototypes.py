"""Prototypes: an example is hard that is far from what is typical.

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022, section 4: k-means in the space of a self-supervised model, and the distance to the nearest
centroid; about as many centroids as classes, and ten times more or fewer change little. With labels
the prototype is the mean of the class.

*Differs*: the space is the vectors that are given, or hashed n-grams of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Ge

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import seed64
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneError, PruneExamples, Scores, ScoreWork
from shoal.ir import Estimate, Machine

PrototypeMetric: TypeAlias = Literal["euclidean", "cosine"]

# Passes of k-means over its sample in all starts, and the rows of that sample.
_STARTS, _PASSES, _SAMPLE = 3, 60, 50_000
_UNLABELLED = 100
_BLOCK = 8_000_000


@part
class SSLPrototypes:
    """Distance to the nearest of k-means' centroids; needs no labels.

    Args:
        prototypes: centroids; 0 for as many as classes, or without labels 100, and at most a tenth
            of the examples.
        metric: ``euclidean``, or ``cosine``, for which vectors are first scaled to length 1.
    """

    needs_labels: ClassVar[bool] = False

    prototypes: Annotated[int, Ge(0)] = 0
    metric: PrototypeMetric = "euclidean"

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """Passes of k-means over a sample, and all examples once."""
        count = num_prototypes(self.prototypes, work.rows, work.classes)
        sample = min(work.rows, _SAMPLE)
        distances = float(count) * (_PASSES * sample + work.rows)
        return score_estimate(work, numbers=distances * work.dim, held=4.0 * work.rows)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """The distances."""
        X = in_metric(examples.X, self.metric)
        count = num_prototypes(self.prototypes, len(X), examples.classes)
        return nearest_distance(X, centroids(X, count, seed))


@part
class SupervisedPrototypes:
    """Distance to the mean of the example's own class.

    Args:
        metric: ``euclidean``, or ``cosine``, for which vectors are first scaled to length 1.
    """

    needs_labels: ClassVar[bool] = True

    metric: PrototypeMetric = "euclidean"

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """Every number twice."""
        return score_estimate(work, numbers=2.0 * work.rows * work.dim, held=4.0 * work.rows)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With labels."""
        if work.classes > 1:
            yield self

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """The distances."""
        X, result = in_metric(examples.X, self.metric), np.empty(len(examples.X))
        for number in range(examples.classes):
            mine = examples.labels == number
            if mine.any():
                result[mine] = nearest_distance(X[mine], X[mine].mean(axis=0, keepdims=True))
        return result


def num_prototypes(asked: int, rows: int, classes: int) -> int:
    """How many centroids there are."""
    return asked or max(1, min(classes or _UNLABELLED, rows // 10))


def in_metric(X: npt.NDArray[np.float32], metric: PrototypeMetric) -> npt.NDArray[np.float32]:
    """Vectors whose euclidean distances follow the metric."""
    if metric == "euclidean":
        return X
    norm = np.linalg.norm(X, axis=1, keepdims=True)
    return np.asarray(X / np.where(norm > 0, norm, 1.0), np.float32)


def centroids(X: npt.NDArray[np.float32], count: int, seed: int) -> npt.NDArray[np.float32]:
    """Float32 [count, d] of k-means.

    Args:
        X: float32 [n, d]; of more than 50,000 rows the first are used.
        count: 1 to n.
        seed: of the starts.

    Raises:
        PruneError: there are fewer rows.
    """
    if count > len(X):
        raise PruneError(f"prototypes = {count}: expected 1 to {len(X)}, the number of examples")
    cluster: Any = import_extra("sklearn.cluster", extra="fields", purpose="prototypes")
    sample = X[:_SAMPLE]
    # With more clusters than different rows, some centroids are the same: no harm here.
    count = min(count, len(np.unique(sample, axis=0))) if len(sample) < 2 * count else count
    state = seed64(seed, purpose="prototypes") % 2**32
    model = cluster.KMeans(count, n_init=_STARTS, random_state=state).fit(sample)
    return np.asarray(model.cluster_centers_, np.float32)


def nearest_distance(X: npt.NDArray[np.float32], middles: npt.NDArray[np.float32]) -> Scores:
    """Float64 [n]: the euclidean distance to the nearest of some points.

    Args:
        X: float32 [n, d].
        middles: float32 [k, d].
    """
    result = np.empty(len(X))
    lengths = (middles.astype(np.float64) ** 2).sum(axis=1)
    rows = max(1, _BLOCK // max(len(middles), X.shape[1]))
    for first in range(0, len(X), rows):
        block = X[first : first + rows]
        # The nearest by products, its distance by differences: those of equal points are 0.
        near = (lengths - 2 * (block @ middles.T)).argmin(axis=1)
        apart = block.astype(np.float64) - middles[near]
        result[first : first + rows] = np.sqrt((apart**2).sum(axis=1))
    return result
