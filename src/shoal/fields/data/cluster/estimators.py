"""k-medoids as estimators of scikit-learn: ``KMedoids``, ``FasterCLARA`` and ``FasterCLARANS``.

Source: Schubert, Rousseeuw, Fast and Eager k-Medoids Clustering: O(k) Runtime Improvement of the
PAM, CLARA, and CLARANS Algorithms, 2021.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClusterMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import pairwise_distances
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.core.parts import Choice, table
from shoal.fields.data.cluster.protocols import ClusterError, ClusteringProblem
from shoal.fields.data.cluster.search import Ids
from shoal.fields.data.cluster.solve import check_k, solve
from shoal.fields.data.cluster.storage import STORAGES, Metric, Objects, Precomputed, Vectors

_STARTS = ("random", "build", "lab")
_METHODS = ("fasterpam", "fastpam1", "pam", "alternating")


class _Medoids(ClusterMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What the three share; a sub-class says how medoids are found."""

    n_clusters: int
    metric: Metric
    symmetric: bool
    random_state: Any

    def _choice(self) -> Choice:
        raise TypeError(f"{type(self).__name__} does not say how medoids are found")

    def _search(self, objects: Objects) -> dict[str, Any]:
        return {}

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find medoids.

        Args:
            X: [n, d] vectors, dense or sparse; or [n, n] dissimilarities with
                ``metric="precomputed"``.
            y: not used.

        Raises:
            ClusterError: there cannot be so many clusters; dissimilarities that are not square,
                finite or symmetric; a sparse X with a function as metric.
        """
        X = self._checked(X, reset=True)
        if not isinstance(self.n_clusters, int | np.integer) or self.n_clusters < 1:
            raise ClusterError(f"n_clusters = {self.n_clusters!r}: expected a number from 1 on")
        check_k(int(self.n_clusters), X.shape[0])
        objects = self._objects(X)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        method = table("clusterer").build(self._choice(), where="method")
        problem = ClusteringProblem(objects=objects, k=int(self.n_clusters), seed=seed)
        for name, value in self._search(objects).items():
            setattr(problem, name, value)
        solution = solve(method, problem)
        result = solution.result
        if not result.converged and result.passes >= problem.max_iter:
            warnings.warn(
                f"max_iter = {problem.max_iter} passes, and swaps still improve the loss; "
                "give more",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.medoid_indices_: Ids = np.asarray(result.medoids)
        self.labels_: Ids = solution.labels
        self.inertia_: float = solution.loss
        self.n_swap_: int = result.swaps
        self.n_iter_: int = max(result.passes, 1)
        if self.metric != "precomputed":
            self.cluster_centers_ = X[self.medoid_indices_]
        self._n_features_out = int(self.n_clusters)
        return self

    def predict(self, X: Any) -> Ids:
        """Int64 [m]: the cluster of the nearest medoid.

        Args:
            X: [m, d] vectors, or [m, n] dissimilarities to the objects of ``fit``.
        """
        labels: Ids = self.transform(X).argmin(axis=1)
        return labels

    def transform(self, X: Any) -> npt.NDArray[np.float64]:
        """[m, k]: how far each object is from each medoid.

        Args:
            X: [m, d] vectors, or [m, n] dissimilarities to the objects of ``fit``.
        """
        check_is_fitted(self)
        X = self._checked(X, reset=False)
        if self.metric == "precomputed":
            return np.asarray(X[:, self.medoid_indices_], np.float64)
        # Together with the medoids, so that the same metric with the same parameters is used.
        result = pairwise_distances(X, self.cluster_centers_, metric=self.metric)
        return np.asarray(result, np.float64)

    def _checked(self, X: Any, *, reset: bool) -> Any:
        # Dissimilarities are checked where they are read: the messages name the row.
        given = self.metric == "precomputed"
        sparse: Any = False if given else "csr"
        if given and hasattr(X, "tocsr"):
            raise ClusterError("precomputed: a sparse matrix: what it lacks is not zero; give all")
        return validate_data(
            self,
            X,
            reset=reset,
            accept_sparse=sparse,
            dtype=[np.float64, np.float32],
            ensure_all_finite=not (given and reset),
        )

    def _objects(self, X: Any) -> Objects:
        if self.metric == "precomputed":
            return Precomputed(X, symmetric=self.symmetric)
        return Vectors(X, self.metric)

    def __sklearn_tags__(self) -> Any:
        """Sparse vectors are taken; with ``precomputed``, square matrices."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self.metric != "precomputed" and not callable(self.metric)
        tags.input_tags.pairwise = self.metric == "precomputed"
        tags.transformer_tags.preserves_dtype = []
        return tags


class KMedoids(_Medoids):
    """Clusters around medoids, by FasterPAM or another method that swaps.

    Args:
        n_clusters: how many, 1 to n.
        metric: a name that scikit-learn knows, a function of two rows, or ``precomputed``.
        method: ``fasterpam``, ``fastpam1`` and ``pam``, which give the same medoids, or
            ``alternating``, which is quick and worse.
        init: ``random``, ``build`` or ``lab``; or the k initial medoids.
        max_iter: most passes over the candidates; of fastpam1 and pam, most swaps.
        storage: ``full32``, ``condensed`` or ``on_demand``: how dissimilarities are kept.
        symmetric: refuse precomputed dissimilarities that are not; if False, row o and column c say
            how far object o is from medoid c.
        n_threads: threads; the result does not depend on them.
        random_state: of the start.

    Attributes:
        medoid_indices_: int64 [k], objects of ``fit``.
        labels_: int64 [n], cluster of each object.
        inertia_: sum of the dissimilarities to the nearest medoid.
        n_swap_: swaps made.
        n_iter_: passes over the candidates.
        cluster_centers_: [k, d], the medoids; not with ``precomputed``.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        metric: Metric = "euclidean",
        method: Literal["fasterpam", "fastpam1", "pam", "alternating"] = "fasterpam",
        init: Any = "random",
        max_iter: int = 100,
        storage: Literal["full32", "condensed", "on_demand"] = "full32",
        symmetric: bool = True,
        n_threads: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.metric = metric
        self.method = method
        self.init = init
        self.max_iter = max_iter
        self.storage = storage
        self.symmetric = symmetric
        self.n_threads = n_threads
        self.random_state = random_state

    def _choice(self) -> Choice:
        _among("method", self.method, _METHODS)
        _among("storage", self.storage, STORAGES)
        return Choice(name=self.method, options={"storage": self.storage})

    def _search(self, objects: Objects) -> dict[str, Any]:
        for name in ("max_iter", "n_threads"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise ClusterError(f"{name} = {value!r}: expected a number from 1 on")
        result = {"max_iter": int(self.max_iter), "threads": int(self.n_threads)}
        if isinstance(self.init, str):
            _among("init", self.init, _STARTS)
            return {**result, "init": self.init}
        start = np.asarray(self.init)
        inside = start.dtype.kind in "iu" and ((start >= 0) & (start < objects.n)).all()
        if start.shape != (self.n_clusters,) or not inside or len(set(start.tolist())) < len(start):
            raise ClusterError(
                f"init: expected {', '.join(_STARTS)} or {self.n_clusters} different objects from "
                f"0 to {objects.n - 1}"
            )
        return {**result, "start": start}


class FasterCLARA(_Medoids):
    """Clusters around medoids of samples, for more objects than n² dissimilarities allow.

    Args:
        n_clusters: how many, 1 to n.
        metric: a name that scikit-learn knows, a function of two rows, or ``precomputed``.
        n_samples: samples that are clustered.
        sample_size: objects of each; None for 80 + 4k.
        symmetric: refuse precomputed dissimilarities that are not.
        random_state: of the samples.

    Attributes:
        medoid_indices_: int64 [k], objects of ``fit``.
        labels_: int64 [n], cluster of each object.
        inertia_: sum of the dissimilarities to the nearest medoid.
        n_swap_: swaps made, in all samples.
        n_iter_: samples.
        cluster_centers_: [k, d], the medoids; not with ``precomputed``.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        metric: Metric = "euclidean",
        n_samples: int = 5,
        sample_size: int | None = None,
        symmetric: bool = True,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.metric = metric
        self.n_samples = n_samples
        self.sample_size = sample_size
        self.symmetric = symmetric
        self.random_state = random_state

    def _choice(self) -> Choice:
        options = {"samples": self.n_samples, "size": self.sample_size or 0}
        return Choice(name="clara", options=options)


class FasterCLARANS(_Medoids):
    """Clusters around medoids that candidates at random improve; few dissimilarities are computed.

    Args:
        n_clusters: how many, 1 to n.
        metric: a name that scikit-learn knows, a function of two rows, or ``precomputed``.
        n_restarts: searches, of which the best counts.
        patience: give up after this share of n - k candidates in a row without a swap.
        storage: ``on_demand``, ``full32`` or ``condensed``.
        symmetric: refuse precomputed dissimilarities that are not.
        random_state: of starts and candidates.

    Attributes:
        medoid_indices_: int64 [k], objects of ``fit``.
        labels_: int64 [n], cluster of each object.
        inertia_: sum of the dissimilarities to the nearest medoid.
        n_swap_: swaps made, in all restarts.
        n_iter_: batches of candidates.
        cluster_centers_: [k, d], the medoids; not with ``precomputed``.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        metric: Metric = "euclidean",
        n_restarts: int = 2,
        patience: float = 0.025,
        storage: Literal["full32", "condensed", "on_demand"] = "on_demand",
        symmetric: bool = True,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.metric = metric
        self.n_restarts = n_restarts
        self.patience = patience
        self.storage = storage
        self.symmetric = symmetric
        self.random_state = random_state

    def _choice(self) -> Choice:
        _among("storage", self.storage, STORAGES)
        options = {
            "restarts": self.n_restarts,
            "patience": self.patience,
            "storage": self.storage,
        }
        return Choice(name="clarans", options=options)


def _among(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ClusterError(f"{name} = {value!r}: expected one of {', '.join(allowed)}")
