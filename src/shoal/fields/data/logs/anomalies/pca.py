"""PCA: groups of events that the usual directions of their counts do not explain.

Source: Xu et al., Detecting Large-Scale System Problems by Mining Console Logs, 2009. The usual
directions have most of the variance of the event counts; what is left of a group is its squared
prediction error, and a group above the Q statistic of Jackson and Mudholkar is an anomaly.

Differs: it begins without the groups that are farthest from the middle, as Hubert, Rousseeuw and
Vanden Branden, ROBPCA, 2005, do, and is fitted again without what it has called anomalies, as these
are in the log that it learns from; and events are not weighted by how rare they are, unless that is
asked for, since the weight of an event that every sound group has is 0, and its absence would not
be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from shoal.core.parts import part
from shoal.fields.data.logs.anomalies.groups import detection_estimate, weighted
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups, Floats
from shoal.fields.data.logs.native import Bools
from shoal.fields.data.logs.protocols import LogWork
from shoal.ir import Estimate, Machine


@part
class EventPCA:
    """Squared prediction error of event counts; needs no labels, and counts alone, not order.

    Args:
        variance: share of the variance that the usual directions have.
        alpha: share of usual groups that may be called anomalies.
        tf_idf: weigh events by how rare they are.
        trim: share of the groups, the farthest from the middle, that the first fit leaves out.
        rounds: fits; each leaves out what the one before has called anomalies.
    """

    variance: Annotated[float, Gt(0), Lt(1)] = 0.95
    alpha: Annotated[float, Gt(0), Lt(1)] = 0.001
    tf_idf: bool = False
    trim: Annotated[float, Ge(0), Lt(0.5)] = 0.1
    rounds: Annotated[int, Ge(1), Le(20)] = 3

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """A covariance, and a projection."""
        return detection_estimate(work, 60.0)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score by the squared prediction error."""
        counts = groups.counts()
        vectors = weighted(counts) if self.tf_idf else counts
        # It begins without those that are farthest from the middle: many of one fault would be a
        # direction of their own.
        far = np.linalg.norm(vectors - np.median(vectors, axis=0), axis=1)
        errors, anomalous = far, far > np.quantile(far, 1.0 - self.trim)
        for _ in range(self.rounds):
            errors, threshold = self._errors(vectors, ~anomalous)
            before, anomalous = anomalous, errors > threshold
            if np.array_equal(before, anomalous) or (~anomalous).sum() < 2:
                break
        return Detection(errors, anomalous, np.ones(len(errors), np.bool_))

    def _errors(self, vectors: Floats, learned: Bools) -> tuple[Floats, float]:
        """Squared prediction error of each group, and the threshold, by what some groups show."""
        centred = vectors - vectors[learned].mean(axis=0)
        some = centred[learned]
        values, axes = np.linalg.eigh(some.T @ some / max(len(some) - 1, 1))
        values, axes = np.maximum(values[::-1], 0.0), axes[:, ::-1]
        total = max(float(values.sum()), 1e-300)
        usual = int(np.searchsorted(np.cumsum(values) / total, self.variance)) + 1
        left = centred - (centred @ axes[:, :usual]) @ axes[:, :usual].T
        errors: Floats = (left**2).sum(axis=1)
        # Below that is rounding.
        return errors, max(q_statistic(values[usual:], self.alpha), 1e-9 * total)


def q_statistic(values: Floats, alpha: float) -> float:
    """The squared prediction error that a share ``alpha`` of normal groups exceeds.

    Args:
        values: variances along the directions that are not usual.
        alpha: the share.

    Source: Jackson, Mudholkar, Control Procedures for Residuals Associated With Principal Component
    Analysis, 1979.
    """
    first, second, third = (float((values**power).sum()) for power in (1, 2, 3))
    if first <= 1e-12 or second <= 0.0:
        return 1e-9
    h = 1.0 - 2.0 * first * third / (3.0 * second**2)
    if abs(h) < 1e-6:
        h = 1e-6
    c = NormalDist().inv_cdf(1.0 - alpha)
    inside = c * np.sqrt(2.0 * second * h * h) / first + 1.0 + second * h * (h - 1.0) / first**2
    return float(first * max(inside, 1e-12) ** (1.0 / h))
