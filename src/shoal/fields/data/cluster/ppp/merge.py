"""Merging: clusters that a mixture cannot tell apart become one.

Two clusters stay two where that improves the Bayesian information criterion by more than 10, and
where their posteriors overlap by less than 5 %: the sum over the rows of the smaller of the two
posteriors, as a share of the smaller cluster.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from shoal.fields.data.cluster.ppp.mixture import (
    FORMS,
    CovarianceForm,
    covariances_of,
    fit_mixture,
    parameters,
)
from shoal.fields.data.cluster.ppp.points import Ids, WeightedPoints

_GAIN, _OVERLAP = 10.0, 0.05
_EM_STEPS = 20


class ClusterMoments(NamedTuple):
    """Of the clusters of a partition: mass [K], means [K, D], scatter [K, D, D]."""

    mass: np.ndarray
    means: np.ndarray
    scatter: np.ndarray

    def merged(self, a: int, b: int) -> ClusterMoments:
        """With two clusters as one, the last."""
        rest = [at for at in range(len(self.mass)) if at not in (a, b)]
        mass = self.mass[a] + self.mass[b]
        share = self.mass[[a, b]] / mass
        apart = self.means[a] - self.means[b]
        both = self.scatter[a] + self.scatter[b] + np.outer(apart, apart) * share.prod() * mass
        return ClusterMoments(
            np.append(self.mass[rest], mass),
            np.concatenate([self.means[rest], (share @ self.means[[a, b]])[None]]),
            np.concatenate([self.scatter[rest], both[None]]),
        )

    def bic(self, form: CovarianceForm) -> float:
        """Bayesian information criterion of Gaussians that the rows are divided among."""
        each = covariances_of(self.mass, self.scatter, form)
        sizes = np.linalg.slogdet(each)[1]
        inner = np.trace(np.linalg.solve(each, self.scatter), axis1=1, axis2=2)
        rows = self.mass.sum()
        fit = self.mass @ np.log(self.mass / rows) - 0.5 * (self.mass @ sizes + inner.sum())
        return float(-2.0 * fit + parameters(form, *self.means.shape) * np.log(rows))


def moments_of(points: WeightedPoints, labels: Ids) -> ClusterMoments:
    """Moments of the clusters of a partition.

    Args:
        points: what is clustered.
        labels: [M], 0 to K - 1, each of them used.
    """
    member = (np.eye(int(labels.max()) + 1)[labels] * points.weights[:, None]).T
    mass = member.sum(axis=1)
    means = member @ points.X / mass[:, None]
    apart = points.X - means[labels]
    scatter = [(apart.T * row) @ apart for row in member]
    return ClusterMoments(mass, means, np.stack(scatter))


def form_of(moments: ClusterMoments) -> CovarianceForm:
    """The form of covariances with the least BIC."""
    return min(FORMS, key=moments.bic)


def merged(points: WeightedPoints, labels: Ids, most: int) -> Ids:
    """Merge one pair after the other until every pair is separate.

    The pair that overlaps most goes first; where none overlaps too much, the pair that gains least.

    Args:
        points: what is clustered.
        labels: [M].
        most: clusters that may be left.

    Returns:
        Labels [M] by the posteriors, 0 to K - 1.
    """
    labels = numbered(labels)
    while labels.max():
        form = form_of(moments_of(points, labels))
        fitted = fit_mixture(points, labels, steps=_EM_STEPS, form=form)
        before, labels = labels, numbered(fitted.labels)
        if labels.max() < before.max():  # a component without rows
            continue
        overlap = overlaps(points, fitted.posterior)
        a, b = np.unravel_index(int(overlap.argmax()), overlap.shape)
        if overlap[a, b] < _OVERLAP:
            gain = _gains(moments_of(points, labels), form)
            a, b = np.unravel_index(int(gain.argmin()), gain.shape)
            if gain[a, b] > _GAIN and labels.max() < most:
                break
        labels = numbered(np.where(labels == b, a, labels))
    return labels


def numbered(labels: Ids) -> Ids:
    """The same partition with labels from 0 on, none left out."""
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def overlaps(points: WeightedPoints, posterior: np.ndarray) -> np.ndarray:
    """[K, K], above the diagonal: overlap of the posteriors of two clusters."""
    mass = np.maximum(points.weights @ posterior, 1e-300)
    result = np.zeros((len(mass), len(mass)))
    for a in range(len(mass) - 1):
        both = points.weights @ np.minimum(posterior[:, a, None], posterior[:, a + 1 :])
        result[a, a + 1 :] = both / np.minimum(mass[a], mass[a + 1 :])
    return result


def _gains(moments: ClusterMoments, form: CovarianceForm) -> np.ndarray:
    """[K, K]: how much the BIC grows if two clusters become one."""
    count = len(moments.mass)
    result, now = np.full((count, count), np.inf), moments.bic(form)
    # The one cluster may need what the two do without: numbers off the diagonal.
    forms = {form, CovarianceForm(form.shared)}
    for a, b in combinations(range(count), 2):
        one = moments.merged(a, b)
        result[a, b] = min(one.bic(each) for each in forms) - now
    return result
