"""The partition: cut where k-means and a mixture agree, cut the parts again, merge, refine.

Source: Probabilistic Partitive Partitioning, 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.fields.data.cluster.ppp.merge import form_of, merged, moments_of, numbered, overlaps
from shoal.fields.data.cluster.ppp.mixture import CovarianceForm, FittedMixture, fit_mixture
from shoal.fields.data.cluster.ppp.points import Ids, WeightedPoints
from shoal.fields.data.cluster.ppp.sweep import Cut, in_order, sweep

_EM_STEPS = 1000

Say = Callable[[float, str], None]


@dataclass(frozen=True)
class PartitionFit:
    """What was found.

    Args:
        fitted: the mixture.
        form: of its covariances.
        cuts: of the sweep over all points; none where there are too few.
        chosen: k of the cut that was taken; 1 for none.
        overlap: largest overlap of two clusters.
    """

    fitted: FittedMixture
    form: CovarianceForm
    cuts: list[Cut]
    chosen: int
    overlap: float


def partition(
    points: WeightedPoints, k_max: int, restarts: int, random: np.random.Generator, say: Say
) -> PartitionFit:
    """Find clusters, and how many.

    Args:
        points: what is clustered.
        k_max: most clusters.
        restarts: of k-means for each k.
        random: draws their starts.
        say: receives the share that is done, and what is being done.
    """
    say(0.0, "sweep")
    labels, cuts, chosen = _divided(points, k_max, restarts, random)
    say(0.9, "mixture")
    form = form_of(moments_of(points, labels))
    fitted = fit_mixture(points, labels, steps=_EM_STEPS, form=form)
    while len(np.unique(fitted.labels)) <= labels.max():  # a component without rows
        labels = numbered(fitted.labels)
        fitted = fit_mixture(points, labels, steps=_EM_STEPS, form=form)
    overlap = float(overlaps(points, fitted.posterior).max())
    return PartitionFit(fitted, form, cuts, chosen, overlap)


def _divided(
    points: WeightedPoints, k_max: int, restarts: int, random: np.random.Generator
) -> tuple[Ids, list[Cut], int]:
    """Labels [M] of a cut whose parts are cut again, all cuts, and k of the one that was taken."""
    whole = np.zeros(len(points.weights), np.int64)
    # A part needs points enough for a covariance.
    if k_max < 2 or len(whole) < 2 * (points.X.shape[1] + 2):
        return whole, [], 1
    cuts = sweep(points, k_max, restarts, random)
    for cut in in_order(points, cuts, random):
        labels = merged(points, cut.runs.best, k_max)
        if labels.max():
            break
    else:
        return whole, cuts, 1
    finer, parts = labels.copy(), int(labels.max()) + 1
    for part in range(parts):
        inside = np.flatnonzero(labels == part)
        below, _, _ = _divided(points.take(inside), max(2, k_max // parts), restarts, random)
        finer[inside[below > 0]] = finer.max() + below[below > 0]
    if finer.max() > labels.max():  # what does not last among its neighbours was no cut
        finer = merged(points, finer, k_max)
    return (finer if finer.max() > labels.max() else labels), cuts, cut.k
