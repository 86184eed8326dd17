"""PPP: clusters that k-means finds again and again and that a Gaussian mixture confirms.

Source: Probabilistic Partitive Partitioning, 2020. The paper leaves room; what is done here is in
the docstrings of ``sweep.py``, ``merge.py`` and ``partition.py``.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.fields.data.cluster.ppp.lloyd import improved, lloyd, restarts_of, slab_starts
from shoal.fields.data.cluster.ppp.partition import Say, partition
from shoal.fields.data.cluster.ppp.points import (
    MICRO,
    MOST_POINTS,
    Ids,
    WeightedPoints,
    canonical,
    micro_clusters,
)
from shoal.fields.data.cluster.protocols import ClusterError

# Restarts whose scatter is within this share of the best say which rows are in doubt.
_GOOD = 0.01
# Rows whose posteriors are computed at a time.
_BLOCK = 65_536


class PPP(ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Probabilistic partitive partitioning: finds clusters and how many, the same ones every time.

    For each number of clusters k-means is restarted; numbers at which the restarts agree with each
    other, and with a Gaussian mixture, are candidates. The clusters of the best are cut again as
    long as that helps, and clusters that the mixture cannot tell apart are merged. Neither the
    order of the rows nor the seed should matter: rows are sorted first, and clusters are numbered
    by their centres.

    The columns count as they are: scale them where they have different units.

    Args:
        k_max: most clusters; no more than half of the distinct rows are tried.
        restarts: of k-means for each number of clusters.
        tau: least posterior of a row that is surely in its cluster, in (0, 1].
        random_state: draws the starts of k-means.

    Attributes:
        labels_: int64 [n], cluster of each row.
        n_clusters_: how many there are.
        cluster_centers_: [k, d], means of the rows that are surely in a cluster. Clusters are in
            the lexicographic order of their means.
        separable_mask_: bool [n], rows whose posterior is at least tau and that good restarts of
            k-means put into the same cluster.
        weights_, means_, covariances_: [k], [k, c], [k, c, c], the Gaussian mixture over the c
            columns that are not constant.
        report_: the sweep (k, repeatability, validation, compactness, bic), the number of clusters
            that was cut first, the largest overlap of two clusters, the form of the covariances,
            points that were clustered in place of the rows, constant columns.

    Examples:
        >>> import numpy as np
        >>> from shoal.fields.data.cluster import PPP
        >>> draw = np.random.default_rng(0)
        >>> X = np.concatenate([draw.normal(size=(60, 2)) + at for at in ([0, 0], [9, 0], [0, 9])])
        >>> model = PPP().fit(X)
        >>> model.n_clusters_, np.bincount(model.labels_).tolist()
        (3, [60, 60, 60])
    """

    def __init__(
        self,
        k_max: int = 20,
        restarts: int = 10,
        tau: float = 0.95,
        *,
        random_state: Any = None,
    ) -> None:
        self.k_max = k_max
        self.restarts = restarts
        self.tau = tau
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find clusters.

        Args:
            X: [n, d], finite.
            y: not used.

        Raises:
            ClusterError: an option that cannot be.
        """
        return self.fit_saying(X, lambda done, text: None)

    def fit_saying(self, X: Any, say: Say) -> Self:
        """As ``fit``; ``say`` receives shares that are done, and what is being done."""
        X = validate_data(self, X, dtype=np.float64)
        _whole("k_max", self.k_max, 1)
        _whole("restarts", self.restarts, 2)
        if not 0 < self.tau <= 1:
            raise ClusterError(f"tau = {self.tau!r}: expected a number in (0, 1]")
        random = np.random.default_rng(check_random_state(self.random_state).randint(2**31 - 1))
        say(0.0, "sorting")
        rows, weights, place = canonical(X)
        varies = np.ptp(rows, axis=0) > 0
        self._columns = np.flatnonzero(varies) if varies.any() else np.arange(1)
        rows = rows[:, self._columns]
        self._centre = np.average(rows, axis=0, weights=weights)
        spread = float(np.average((rows - self._centre) ** 2, axis=0, weights=weights).sum())
        self._scale = spread**0.5 or 1.0
        points = WeightedPoints((rows - self._centre) / self._scale, weights)
        few, near = points, np.arange(len(weights))
        if len(weights) > MOST_POINTS:
            say(0.0, "micro-clusters")
            few, near = micro_clusters(points.X, weights, MICRO)
        most = min(int(self.k_max), max(1, len(weights) // 2))
        if most < self.k_max:
            warnings.warn(
                f"k_max = {self.k_max}: no more than {most} clusters are tried, half of the "
                f"{len(weights)} distinct rows; give a smaller k_max, or more rows",
                UserWarning,
                stacklevel=3,
            )
        found = partition(few, most, int(self.restarts), random, say)
        say(1.0, "labels")
        self._mixture = found.fitted.mixture
        agreed = _agreed(found.fitted.labels, few, int(self.restarts), random)[near]
        posterior = self._posterior(points.X)
        labels, separable = posterior.argmax(axis=1), agreed & (posterior.max(axis=1) >= self.tau)
        centres = _centres(points, labels, separable, self._mixture.means)
        order = np.lexsort(self._mixture.means.round(9).T[::-1])
        self._mixture = self._mixture.take(order)
        self.labels_: Ids = order.argsort()[labels][place]
        self.n_clusters_ = len(order)
        self.separable_mask_ = separable[place]
        self.cluster_centers_ = np.repeat(X[:1], len(order), axis=0)
        self.cluster_centers_[:, self._columns] = centres[order] * self._scale + self._centre
        self.weights_ = self._mixture.shares
        self.means_ = self._mixture.means * self._scale + self._centre
        self.covariances_ = self._mixture.covariances * self._scale**2
        self.report_: dict[str, Any] = {
            "sweep": [
                {
                    "k": cut.k,
                    "repeatability": cut.repeatability,
                    "validation": cut.validation,
                    "compactness": cut.compactness,
                    "bic": cut.bic if np.isfinite(cut.bic) else None,
                }
                for cut in found.cuts
            ],
            "cut": found.chosen,
            "overlap": found.overlap,
            "separable": float(self.separable_mask_.mean()),
            "covariances": str(found.form),
            "points": len(few.weights),
            "constant_columns": np.flatnonzero(~varies).tolist(),
        }
        return self

    def predict(self, X: Any) -> Ids:
        """Int64 [m]: the most likely cluster of each row.

        Args:
            X: [m, d].
        """
        labels: Ids = self.predict_proba(X).argmax(axis=1)
        return labels

    def predict_proba(self, X: Any) -> np.ndarray:
        """[m, k]: posterior of the clusters.

        Args:
            X: [m, d].
        """
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return self._posterior((X[:, self._columns] - self._centre) / self._scale)

    def _posterior(self, X: np.ndarray) -> np.ndarray:
        blocks = [X[first : first + _BLOCK] for first in range(0, len(X), _BLOCK)]
        return np.concatenate([self._mixture.posterior(block)[0] for block in blocks])


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        raise ClusterError(f"{name} = {value!r}: expected a whole number from {least} on")


def _agreed(labels: Ids, points: WeightedPoints, count: int, random: np.random.Generator) -> Any:
    """Bool [M]: points that k-means puts where the mixture does.

    The restarts that count are the best of all, and of those that begin at slabs the good ones:
    they are the same for every seed.
    """
    k = int(labels.max()) + 1
    if k == 1:
        return np.ones(len(labels), bool)
    best = improved(points, restarts_of(points, k, count, random), k)
    slabs = lloyd(points, np.stack(slab_starts(points, k, count)))
    good = slabs.labels[slabs.scatter <= best.scatter.min() * (1 + _GOOD)]
    result = np.ones(len(labels), bool)
    for run in (best.best, *good):
        common = np.zeros((k, k))
        np.add.at(common, (run, labels), points.weights)
        result &= linear_sum_assignment(-common)[1][run] == labels
    return result


def _centres(
    points: WeightedPoints, labels: Ids, separable: np.ndarray, means: np.ndarray
) -> np.ndarray:
    """[K, D]: means of the separable rows; of the mixture where a cluster has none."""
    own = WeightedPoints(points.X, points.weights * separable).means(labels, len(means))
    return np.where(own.weights[:, None] > 0, own.X, means)
