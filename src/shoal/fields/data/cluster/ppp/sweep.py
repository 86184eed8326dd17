"""The sweep: for each number of clusters, how repeatable k-means is, and whether a mixture agrees.

Source: Probabilistic Partitive Partitioning, 2020. The paper leaves room: a cut's score is the mean
adjusted Rand index of pairs of restarts, times that of the best restart and of the Gaussian mixture
which some steps of EM make of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shoal.fields.data.cluster.ppp.agreement import adjusted_rand, mean_adjusted_rand
from shoal.fields.data.cluster.ppp.lloyd import Restarts, improved, restarts_of
from shoal.fields.data.cluster.ppp.mixture import fit_mixture
from shoal.fields.data.cluster.ppp.points import WeightedPoints

# Least score of a cut that is taken. Scores that differ by no more than _TIE are ties: twice the
# standard error of a mean over the pairs of ten restarts.
_LEAST, _TIE = 0.6, 0.2
# A score this close to the least is in doubt, and is measured with so many times the restarts.
_DOUBT, _MORE = 0.1, 4
_EM_STEPS = 5


@dataclass
class Cut:
    """What k-means with one k has found.

    Args:
        k: clusters.
        runs: restarts.
        repeatability: mean adjusted Rand index of pairs of restarts.
        compactness: scatter within the clusters of the best restart, as a share of all.
        validation: adjusted Rand index of the best restart and the mixture; 0 if not looked at.
        bic: of the mixture.
    """

    k: int
    runs: Restarts
    repeatability: float
    compactness: float
    validation: float = 0.0
    bic: float = np.inf

    @property
    def score(self) -> float:
        """Repeatability x validation."""
        return self.repeatability * self.validation

    def validate(self, points: WeightedPoints) -> None:
        """Let a mixture begin at the best restart, and compare."""
        fitted = fit_mixture(points, self.runs.best, steps=_EM_STEPS)
        self.validation = adjusted_rand(self.runs.best, fitted.labels, points.weights)
        self.bic = fitted.bic


def sweep(
    points: WeightedPoints, k_max: int, restarts: int, random: np.random.Generator
) -> list[Cut]:
    """A cut for every k from 2 on."""
    cuts = []
    apart = points.X - np.average(points.X, axis=0, weights=points.weights)
    whole = float(points.weights @ (apart**2).sum(axis=1))
    for k in range(2, min(k_max, len(points.weights) - 1) + 1):
        runs = restarts_of(points, k, restarts, random)
        repeatability = mean_adjusted_rand(runs.labels, points.weights, k)
        cut = Cut(k, runs, repeatability, float(runs.scatter.min()) / whole)
        if repeatability >= _LEAST - _DOUBT:  # else no validation lifts the score that far
            cut.validate(points)
        cuts.append(cut)
    return cuts


def in_order(points: WeightedPoints, cuts: list[Cut], random: np.random.Generator) -> Iterator[Cut]:
    """The cuts that can be taken, best score first, ties by BIC.

    Neither which restart is the best must be left to chance nor on which side of the least score a
    cut is, so k-means goes on with a cut before it is taken; another may then turn out better.
    """
    left, settled = [cut for cut in cuts if cut.score >= _LEAST - _DOUBT], set[int]()
    while left:
        best = max(cut.score for cut in left)
        cut = min((one for one in left if one.score >= best - _TIE), key=lambda one: one.bic)
        if cut.k in settled:
            left.remove(cut)
            if cut.score >= _LEAST:
                yield cut
            continue
        settled.add(cut.k)
        if cut.score < _LEAST + _DOUBT:
            more = restarts_of(points, cut.k, (_MORE - 1) * len(cut.runs.scatter), random)
            cut.runs = cut.runs.joined(more)
            cut.repeatability = mean_adjusted_rand(cut.runs.labels, points.weights, cut.k)
        cut.runs = improved(points, cut.runs, cut.k)
        cut.validate(points)
