"""Logistic regression on event counts, where some groups are known to be anomalies.

Source: Bodik et al., Fingerprinting the Datacenter: Automated Classification of Performance Crises,
2010; as He et al., Experience Report: System Log Analysis for Anomaly Detection, 2016, apply it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Gt, Lt

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.logs.anomalies.groups import detection_estimate
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups
from shoal.fields.data.logs.protocols import LogWork
from shoal.ir import Estimate, Machine


@part
class EventLogistic:
    """Supervised: learns from a share of the groups and their labels, and is judged by the others.

    Args:
        train: share of the groups that it learns from, at random.
        strength: of the regularization; less is stronger.
    """

    train: Annotated[float, Gt(0), Lt(1)] = 0.5
    strength: Annotated[float, Gt(0)] = 10.0

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Some hundred passes over the counts."""
        return detection_estimate(work, 400.0)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score by the probability of an anomaly.

        Raises:
            DataError: there are no labels, or all that are learned from are alike.
        """
        if groups.labels is None:
            raise DataError(
                "anomalies = logistic: no labels: it learns from logs whose lines say which are "
                "alerts, such as BGL and Thunderbird; pca, invariants and clusters need none"
            )
        linear = import_extra("sklearn.linear_model", extra="fields", purpose="logistic regression")
        n = len(groups.names)
        learned = generator(seed, purpose="logistic").permutation(n)[: max(2, int(self.train * n))]
        if len(set(groups.labels[learned].tolist())) < 2:
            raise DataError(
                f"anomalies = logistic: all of the {len(learned)} groups that are learned from "
                "are alike; give a longer log, a larger share (train), or another seed"
            )
        counts = np.log1p(groups.counts())
        model = linear.LogisticRegression(
            C=self.strength, class_weight="balanced", max_iter=1000
        ).fit(counts[learned], groups.labels[learned])
        judged = np.ones(n, np.bool_)
        judged[learned] = False
        scores = model.predict_proba(counts)[:, 1]
        return Detection(scores, scores > 0.5, judged)
