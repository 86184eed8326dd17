"""k-means of weighted points, all restarts of one k at once.

Source: Lloyd, Least Squares Quantization in PCM, 1982; Arthur, Vassilvitskii, k-means++: The
Advantages of Careful Seeding, 2007.

Shapes: M points of D numbers, R restarts, K clusters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from shoal.fields.data.cluster.ppp.points import Ids, WeightedPoints

_ROUNDS = 100
# Clusters that are split, and centres that are given up, in one round of moves.
_MOVES = 3
# Restarts with at most this share more scatter than the best, and how many of them are polished.
_GOOD, _POLISHED = 1e-3, 6


@dataclass(frozen=True)
class Restarts:
    """Where the restarts of k-means ended.

    Args:
        labels: int64 [R, M].
        scatter: [R], weighted sum of squared distances to the centres.
    """

    labels: Ids
    scatter: np.ndarray

    @property
    def best(self) -> Ids:
        """Int64 [M]: labels of the restart with the least scatter."""
        labels: Ids = self.labels[int(self.scatter.argmin())]
        return labels

    def good(self, within: float) -> Ids:
        """[G, M]: labels of restarts with that share more scatter than the best, each end once."""
        ends, firsts = np.unique(self.scatter.round(12), return_index=True)
        result: Ids = self.labels[firsts[ends <= ends[0] * (1 + within)]]
        return result

    def joined(self, other: Restarts) -> Restarts:
        """With more restarts."""
        return Restarts(
            np.concatenate([self.labels, other.labels]), np.append(self.scatter, other.scatter)
        )


def restarts_of(
    points: WeightedPoints, k: int, count: int, random: np.random.Generator
) -> Restarts:
    """Run k-means from several starts.

    A third of the starts cuts the points into slabs along a principal axis each, a third is drawn
    by k-means++, and a third uniformly.

    Args:
        points: what is clustered; at least k of them.
        k: clusters.
        count: restarts.
        random: draws the starts.
    """
    starts = slab_starts(points, k, -(-count // 3))
    for at in range(count - len(starts)):
        if at % 2:
            p = points.weights / points.total
            starts.append(points.X[random.choice(len(p), k, replace=False, p=p)])
        else:
            starts.append(_plus_plus(points, k, random))
    return lloyd(points, np.stack(starts))


def slab_starts(points: WeightedPoints, k: int, count: int) -> list[np.ndarray]:
    """Starts [K, D] that cut the points into slabs along one principal axis each; no chance."""
    return [_slabs(points, k, axis) for axis in range(min(count, points.axes.shape[1]))]


def lloyd(points: WeightedPoints, centres_RKD: np.ndarray) -> Restarts:
    """Assign and average until next to nothing moves.

    Args:
        points: what is clustered.
        centres_RKD: the starts.
    """
    R = len(centres_RKD)
    X, w = points.X, points.weights
    labels, scatter = np.zeros((R, len(w)), np.int64), np.zeros(R)
    active, centres, averages = np.arange(R), centres_RKD.copy(), Averages(points)
    for _ in range(_ROUNDS):
        nearest, least = nearest_of(X, centres[active])
        moved = ((nearest != labels[active]) * w).sum(axis=1)
        labels[active] = nearest
        scatter[active] = (least * w).sum(axis=1)
        active = active[moved > 0]
        if not len(active):
            break
        centres[active] = averages.of(labels[active], centres[active])
    return Restarts(labels, np.maximum(scatter, 0.0))


def nearest_of(X: np.ndarray, centres_RKD: np.ndarray) -> tuple[Ids, np.ndarray]:
    """Of each point the nearest centre [R, M] and its squared distance [R, M]."""
    R, k, dim = centres_RKD.shape
    flat = centres_RKD.reshape(R * k, dim)
    to = flat @ X.T
    to *= -2.0
    to += np.einsum("ij,ij->i", flat, flat)[:, None]
    to = to.reshape(R, k, len(X))
    labels, least = np.zeros((R, len(X)), np.int64), to[:, 0].copy()
    for at in range(1, k):  # numpy's argmin is slow over a short axis
        np.copyto(labels, at, where=to[:, at] < least)
        np.minimum(least, to[:, at], out=least)
    return labels, least + np.einsum("ij,ij->i", X, X)


class Averages:
    """Weighted means of the clusters of several partitions; one sparse product for all of them.

    Args:
        points: what is clustered.
    """

    def __init__(self, points: WeightedPoints) -> None:
        self._weights = points.weights
        self._with_one = np.column_stack([points.X, np.ones(len(points.weights))])
        self._member: sparse.csc_matrix | None = None

    def of(self, labels: Ids, centres_RKD: np.ndarray) -> np.ndarray:
        """[R, K, D] means; the given centre of a cluster that is empty.

        Args:
            labels: int64 [R, M].
            centres_RKD: the centres so far.
        """
        R, k, dim = centres_RKD.shape
        M = len(self._weights)
        clusters = (labels + k * np.arange(R)[:, None]).T.ravel()
        if self._member is None or self._member.shape != (R * k, M):
            weights, starts = np.repeat(self._weights, R), np.arange(0, R * M + 1, R)
            self._member = sparse.csc_matrix((weights, clusters, starts), shape=(R * k, M))
        else:  # scipy takes longer to make one than to multiply
            self._member.indices[:] = clusters
        sums = self._member @ self._with_one
        mass = sums[:, -1:]
        means = sums[:, :-1] / np.where(mass > 0, mass, 1.0)
        return np.where(mass > 0, means, centres_RKD.reshape(R * k, dim)).reshape(R, k, dim)


def _slabs(points: WeightedPoints, k: int, axis: int) -> np.ndarray:
    """[K, D]: means of k slabs of equal weight along a principal axis."""
    order = points.axes[:, axis].argsort(kind="stable")
    w = points.weights[order]
    slab = np.minimum((np.cumsum(w) - w / 2) * k / points.total, k - 1).astype(np.int64)
    return points.take(order).means(slab, k).X


def _plus_plus(points: WeightedPoints, k: int, random: np.random.Generator) -> np.ndarray:
    """[K, D]: k-means++, each centre the best of a few that are drawn."""
    X, w = points.X, points.weights
    tries, chosen = 2 + int(np.log(k)), np.empty(k, np.int64)
    least = np.ones(len(w))
    for at in range(k):
        along = np.cumsum(least * w)
        drawn = np.searchsorted(along, random.random(tries if at else 1) * along[-1])
        drawn = np.minimum(drawn, len(w) - 1)
        apart = ((X[drawn][:, None] - X) ** 2).sum(axis=2)
        if at:
            apart = np.minimum(apart, least)
        best = int((apart @ w).argmin())
        chosen[at], least = drawn[best], apart[best]
    return X[chosen]


def improved(points: WeightedPoints, runs: Restarts, k: int) -> Restarts:
    """Search on from the restarts, until the best is a matter of the points and not of chance.

    The best gives up a centre and splits a cluster, as long as that helps: of the centres those
    that are missed least, of the clusters the widest, along their longest axis. Then single points
    move between the clusters of the best few.

    Args:
        points: what is clustered.
        runs: restarts with that many clusters.
        k: how many.
    """
    while True:
        best = runs.scatter.min()
        moved = lloyd(points, _moves(points, runs.best, k))
        runs = runs.joined(moved)
        if moved.scatter.min() >= best * (1 - 1e-9):
            break
    few = runs.good(_GOOD)[:_POLISHED]
    polished = [_polished(points, labels, k) for labels in few]
    labels, scatter = zip(*polished, strict=True)
    return runs.joined(Restarts(np.stack(labels), np.array(scatter)))


def _moves(points: WeightedPoints, labels: Ids, k: int) -> np.ndarray:
    """[R, K, D]: centres with one given up, and one cluster split."""
    centres, to, own = _distances(points, labels, k)
    wide = np.bincount(labels, own * points.weights, k)
    to[np.arange(len(labels)), labels] = np.inf
    missed = np.bincount(labels, (to.min(axis=1) - own) * points.weights, k)
    starts = []
    for split in wide.argsort(kind="stable")[::-1][:_MOVES]:
        halves = _slabs(points.take(np.flatnonzero(labels == split)), 2, 0)
        for given in missed.argsort(kind="stable")[: _MOVES + 1]:
            if given != split:
                starts.append(centres.copy())
                starts[-1][[split, given]] = halves
    return np.stack(starts)


def _polished(points: WeightedPoints, labels: Ids, k: int) -> tuple[Ids, float]:
    """Labels [M] and scatter after moving single points, the best move first.

    Assigning to the nearest centre overlooks that both centres follow a point that moves; it stops
    at many ends that differ by a few points, from which this goes on to few.

    Source: Hartigan, Clustering Algorithms, 1975; Telgarsky, Vattani, Hartigan's Method, 2010.
    """
    X, w, rows = points.X, points.weights, np.arange(len(labels))
    labels, mass = labels.copy(), np.bincount(labels, points.weights, k)
    centres, to, _ = _distances(points, labels, k)
    for _ in range(len(labels)):
        left = mass[labels] - w
        gain = to[rows, labels] * mass[labels] / np.where(left > 0, left, np.inf)
        cost = to * (mass / (mass + w[:, None]))
        cost[rows, labels] = np.inf
        other = cost.argmin(axis=1)
        better = w * (gain - cost[rows, other])
        at = int(better.argmax())
        if better[at] <= 1e-12 * points.total:
            break
        for cluster, weight in ((labels[at], -w[at]), (other[at], w[at])):
            mass[cluster] += weight
            centres[cluster] += (X[at] - centres[cluster]) * weight / mass[cluster]
            to[:, cluster] = ((X - centres[cluster]) ** 2).sum(axis=1)
        labels[at] = other[at]
    return labels, float(to[rows, labels] @ w)


def _distances(
    points: WeightedPoints, labels: Ids, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centres [K, D], squared distances to them [M, K], and to the own one [M]."""
    centres = points.means(labels, k).X
    to = ((points.X[:, None] - centres) ** 2).sum(axis=2)
    return centres, to, to[np.arange(len(labels)), labels].copy()
