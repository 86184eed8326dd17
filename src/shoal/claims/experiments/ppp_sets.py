"""The data sets of the PPP claim, its runs, and X-means, which it is compared with.

X-means: Pelleg, Moore, X-means: Extending K-means with Efficient Estimation of the Number of
Clusters, 2000; with the variance of a dimension, which the paper's formula leaves out.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.cluster import PPP

K_MAX = 20
"""Most clusters of PPP and of X-means."""

# Numbers of clusters of the blob sets, and least distance of two centres; their standard
# deviations are up to 1.
BLOBS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
_APART, _VARIANCE = 5.0, 0.9


class LabelledSet(NamedTuple):
    """Rows [n, d] and their classes [n]."""

    X: Any
    y: Any

    @property
    def clusters(self) -> int:
        """Classes."""
        return len(np.unique(self.y))


def set_named(name: str, seed: int) -> LabelledSet:
    """A set: ``iris``, ``wine``, ``digits``, ``noise``, ``blobs`` and a number, or ``million``.

    Wine is standardised; digits are on the principal axes that have 90 % of their variance.
    """
    from sklearn import datasets
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import scale

    if name in ("iris", "wine", "digits"):
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        if name == "wine":
            X = scale(X)
        return LabelledSet(PCA(_VARIANCE).fit_transform(X) if name == "digits" else X, y)
    draw = generator(seed, purpose=f"ppp {name}")
    if name == "noise":
        return LabelledSet(draw.uniform(size=(1000, 2)), np.zeros(1000, int))
    k, dim = (10, 8) if name == "million" else (int(name.removeprefix("blobs")), 2)
    dim += k % 4 if name != "million" else 0
    centres: list[Any] = []
    while len(centres) < k:
        one = draw.uniform(-12, 12, dim)
        if all(np.linalg.norm(one - other) > _APART for other in centres):
            centres.append(one)
    sizes = draw.integers(40, 160, k)
    if name == "million":
        sizes = draw.multinomial(1_000_000, sizes / sizes.sum())
    y = np.repeat(np.arange(k), sizes)
    wide = draw.uniform(0.5, 1.0, k)
    return LabelledSet(np.stack(centres)[y] + draw.normal(size=(len(y), dim)) * wide[y, None], y)


def xmeans(X: Any, k_max: int, seed: int) -> Any:
    """Labels [n] of X-means: clusters are split in two as long as the BIC improves.

    It begins with two, as many sets that have more do not become better by a first cut; in the end
    one cluster is taken if that has the better BIC.

    Args:
        X: [n, d].
        k_max: most clusters.
        seed: of k-means.
    """
    from sklearn.cluster import KMeans

    centres = KMeans(min(2, k_max), n_init=5, random_state=seed).fit(X).cluster_centers_
    while True:
        fitted = KMeans(len(centres), init=centres, n_init=1).fit(X)
        halves, split = [], 0
        for at, centre in enumerate(fitted.cluster_centers_):
            rows = X[fitted.labels_ == at]
            two = None
            if len(rows) > 4 and len(centres) + split < k_max:
                two = KMeans(2, n_init=5, random_state=seed).fit(rows)
            if two is not None and _bic(rows, two.labels_) > _bic(rows, np.zeros(len(rows), int)):
                halves += [*two.cluster_centers_]
                split += 1
            else:
                halves.append(centre)
        if not split:
            one = np.zeros(len(X), int)
            return one if _bic(X, one) >= _bic(X, fitted.labels_) else fitted.labels_
        centres = np.stack(halves)


def _bic(X: Any, labels: Any) -> float:
    """Log likelihood of spheres of one width, less the price of their parameters."""
    (n, dim), sizes = X.shape, np.bincount(labels)
    k = len(sizes)
    within = sum(((X[labels == at] - X[labels == at].mean(axis=0)) ** 2).sum() for at in range(k))
    variance = max(within / (dim * max(n - k, 1)), 1e-12)
    fit = sizes @ np.log(sizes / n) - n * dim / 2 * np.log(2 * np.pi * variance) - dim * (n - k) / 2
    return float(fit - (k - 1 + k * dim + 1) / 2 * np.log(n))


class PPPOutcome(NamedTuple):
    """Of one set: labels that came out [u, n], each way once, and the separable rows."""

    labels: Any
    separable: Any


def outcome_of(data: LabelledSet, salt: int, orders: int, seed: int) -> PPPOutcome:
    """What comes out of one seed, with the rows in several orders."""
    labels, separable = [], []
    for order in range(orders):
        rows = generator(salt, purpose="ppp rows", step=seed, index=order).permutation(len(data.X))
        model = PPP(K_MAX, random_state=seed).fit(data.X[rows])
        back = rows.argsort()
        labels.append(model.labels_[back])
        separable.append(model.separable_mask_[back])
    return PPPOutcome(np.unique(labels, axis=0), np.all(separable, axis=0))


def outcomes(pool: Any, data: LabelledSet, salt: int, seeds: int, orders: int) -> PPPOutcome:
    """What comes out of all seeds and orders, each way once."""
    found = pool.map(partial(outcome_of, data, salt, orders), range(seeds))
    labels, separable = zip(*found, strict=True)
    return PPPOutcome(np.unique(np.concatenate(labels), axis=0), np.all(separable, axis=0))


def kmeans_labels(data: LabelledSet, seeds: int) -> Any:
    """Labels [seeds, n] of k-means that is given the number of clusters."""
    from sklearn.cluster import KMeans

    k = data.clusters
    return np.stack([KMeans(k, random_state=seed).fit(data.X).labels_ for seed in range(seeds)])


def hdbscan_labels(data: LabelledSet) -> Any:
    """Labels [n] of HDBSCAN; -1 is noise."""
    from sklearn.cluster import HDBSCAN

    return HDBSCAN(copy=True).fit(data.X).labels_


def seconds_of(seed: int, fits: int) -> list[float]:
    """Seconds of each fit of a million rows."""
    X, result = set_named("million", seed).X, []
    for number in range(fits):
        begin = time.perf_counter()
        PPP(K_MAX, random_state=number).fit(X)
        result.append(time.perf_counter() - begin)
    return result
