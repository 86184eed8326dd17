"""Clusters: groups of events that are far from all frequent kinds of group.

Source: Lin et al., Log Clustering Based Problem Identification for Online Service Systems, 2016
(LogCluster). Weighted counts are clustered by their cosine; a group far from the clusters that
many groups are in is an anomaly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Gt, Lt

from shoal.core.parts import part
from shoal.fields.data.logs.anomalies.groups import detection_estimate
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups, Floats
from shoal.fields.data.logs.protocols import LogWork
from shoal.ir import Estimate, Machine


@part
class EventClusters:
    """Cosine distance to the nearest frequent cluster; needs no labels.

    Args:
        distance: within which a group joins a cluster, and beyond which it is an anomaly.
        frequent: share of the groups from which a cluster is a usual one.
    """

    distance: Annotated[float, Gt(0), Lt(1)] = 0.02
    frequent: Annotated[float, Gt(0), Lt(1)] = 0.02

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Distinct counts against the clusters so far."""
        return detection_estimate(work, 200.0)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score by the distance to the nearest frequent cluster."""
        rows, inverse = np.unique(groups.counts(), axis=0, return_inverse=True)
        inverse = inverse.ravel()
        weights = np.bincount(inverse)
        vectors = np.log1p(rows)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1), 1e-300)[:, None]
        leaders: list[int] = []
        sizes: list[int] = []
        # The most frequent counts lead: what comes later joins the nearest of them.
        for at in np.argsort(-weights, kind="stable").tolist():
            near = 1.0 - vectors[leaders] @ vectors[at]
            if len(leaders) and near.min() <= self.distance:
                sizes[int(near.argmin())] += int(weights[at])
            else:
                leaders.append(at)
                sizes.append(int(weights[at]))
        least = min(self.frequent * weights.sum(), max(sizes))
        usual = [lead for lead, size in zip(leaders, sizes, strict=True) if size >= least]
        nearest: Floats = (1.0 - vectors @ vectors[usual].T).min(axis=1)[inverse]
        return Detection(nearest, nearest > self.distance, np.ones(len(nearest), np.bool_))
