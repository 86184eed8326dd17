"""Data pruning as estimators of scikit-learn: ``DataPruner`` and ``PrototypeDifficulty``.

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022.
"""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.core.parts import Choice, table
from shoal.fields.data.prune.protocols import PruneError, PruneExamples, RowIds, Scores
from shoal.fields.data.prune.scorers.prototypes import (
    PrototypeMetric,
    centroids,
    in_metric,
    nearest_distance,
    num_prototypes,
)
from shoal.fields.data.prune.scoring import scored


class DataPruner(BaseEstimator):  # type: ignore[misc]
    """Choose the training examples that are hard, or easy, and drop the others.

    Args:
        scorer: a name of a part of kind ``data_scorer``, or a dictionary with ``name`` and options.
        keep: share of the examples, (0, 1].
        side: ``hard``, ``easy``, or ``advised``: what the theory of pruning says for so many
            examples of such a dimension.
        floor: share of a class's proportional part that it keeps at least.
        random_state: of whatever the scorer draws.

    Attributes:
        scores_: float64 [n], higher is harder.
        sample_indices_: int64, the examples that are kept, sorted.
    """

    def __init__(
        self,
        scorer: Any = "ssl_prototypes",
        *,
        keep: float = 0.7,
        side: Literal["advised", "hard", "easy"] = "advised",
        floor: float = 0.5,
        random_state: Any = None,
    ) -> None:
        self.scorer = scorer
        self.keep = keep
        self.side = side
        self.floor = floor
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Score the examples and choose among them.

        Args:
            X: [n, d] vectors, of the training set alone.
            y: [n] classes; numbers that are not whole are no classes, and are not used.

        Raises:
            PruneError: the scorer needs classes, or the classes do not allow such a choice.
            ConfigError: an option that cannot be.
        """
        X = validate_data(self, X, dtype=np.float32)
        if not 0 < self.keep <= 1:
            raise PruneError(f"keep = {self.keep!r}: expected a number in (0, 1]")
        classes, codes = _classes(y, len(X))
        scorer = table("data_scorer").build(Choice.model_validate(self.scorer), where="scorer")
        options = {"side": self.side, "floor": self.floor}
        selector = table("data_selector").build(Choice(name="balanced", options=options))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.scores_: Scores = scored(scorer, PruneExamples(X, codes, classes), seed)
        budget = max(1, round(self.keep * len(X)))
        self.sample_indices_: RowIds = selector.select(
            self.scores_, budget, groups=codes, dim=X.shape[1]
        )
        return self

    def fit_resample(self, X: Any, y: Any = None) -> tuple[Any, Any]:
        """The examples that are kept, and their classes, as arrays.

        Args:
            X: [n, d] vectors, of the training set alone.
            y: [n] classes, or None.
        """
        kept = self.fit(X, y).sample_indices_
        return np.asarray(X)[kept], None if y is None else np.asarray(y)[kept]


class PrototypeDifficulty(BaseEstimator):  # type: ignore[misc]
    """How far examples are from the nearest of k-means' centroids.

    Args:
        n_prototypes: centroids; None for 100, and at most a tenth of the examples.
        metric: ``euclidean``, or ``cosine``, for which vectors are first scaled to length 1.
        random_state: of k-means' starts.

    Attributes:
        cluster_centers_: float32 [k, d].
        scores_: float64 [n], distances of the examples of ``fit``; higher is harder.
    """

    def __init__(
        self,
        n_prototypes: int | None = None,
        *,
        metric: PrototypeMetric = "euclidean",
        random_state: Any = None,
    ) -> None:
        self.n_prototypes = n_prototypes
        self.metric = metric
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the prototypes.

        Args:
            X: [n, d] vectors.
            y: not used.

        Raises:
            PruneError: there cannot be so many prototypes, or there is no such metric.
        """
        X = validate_data(self, X, dtype=np.float32)
        if self.metric not in ("euclidean", "cosine"):
            raise PruneError(f"metric = {self.metric!r}: expected euclidean or cosine")
        count = num_prototypes(self.n_prototypes or 0, len(X), 0)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.cluster_centers_ = centroids(in_metric(X, self.metric), count, seed)
        self.scores_: Scores = self.score_samples(X)
        return self

    def score_samples(self, X: Any) -> Scores:
        """Float64 [m]: the difficulty of examples, new or not; higher is harder.

        Args:
            X: [m, d] vectors.
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float32)
        return nearest_distance(in_metric(X, self.metric), self.cluster_centers_)


def _classes(y: Any, rows: int) -> tuple[int, RowIds | None]:
    """How many classes there are, and their numbers; none of targets that are no classes."""
    if y is None:
        return 0, None
    y = column_or_1d(check_array(y, ensure_2d=False, dtype=None, input_name="y"), warn=True)
    check_consistent_length(y, np.empty(rows))
    if type_of_target(y) not in ("binary", "multiclass"):
        return 0, None
    names, codes = np.unique(y, return_inverse=True)
    return len(names), codes.astype(np.int64)
