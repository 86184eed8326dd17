"""Invariant mining: counts of events that go together, such as as many closed as opened.

Source: Lou et al., Mining Invariants from Console Logs for System Problem Detection, 2010. A small
integer combination of counts that is 0 in nearly all groups is an invariant; a group that violates
one is an anomaly.

Differs: combinations of two and three events are tried, the latter between the most frequent
events; the paper goes on to five, which it finds to be rare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.data.logs.anomalies.groups import detection_estimate
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups, Floats
from shoal.fields.data.logs.protocols import LogWork
from shoal.ir import Estimate, Machine

# Events of which three are combined: every triple of them is tried.
_FREQUENT = 24


@part
class InvariantMining:
    """Violated linear invariants of event counts; needs no labels, and says what was violated.

    Args:
        support: share of the groups in which an invariant holds.
        largest: coefficient of an invariant.
    """

    support: Annotated[float, Gt(0.5), Le(1)] = 0.95
    largest: Annotated[int, Ge(1), Le(5)] = 3

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Every pair of events, and triples of the most frequent."""
        return detection_estimate(work, 3e3)

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score by the number of invariants that are violated."""
        rows, inverse = np.unique(groups.counts(), axis=0, return_inverse=True)
        weights = np.bincount(inverse.ravel()).astype(np.float64)
        violated = np.zeros(len(rows))
        for invariant in self.mined(rows, weights):
            violated += rows @ invariant != 0
        result = violated[inverse.ravel()]
        return Detection(result, result > 0, np.ones(len(result), np.bool_))

    def mined(self, rows: Floats, weights: Floats) -> Iterator[Floats]:
        """Invariants, float64 [templates] each.

        Args:
            rows: [n, templates], distinct counts.
            weights: [n], how many groups have them.
        """
        often = (rows > 0).T @ weights
        order = [at for at in np.argsort(-often, kind="stable").tolist() if often[at] > 0]
        total, paired = weights.sum(), set()
        # An invariant between two rare events holds where neither occurs: that says nothing.
        rare = (1.0 - self.support) * total
        order = [at for at in order if often[at] > rare]
        coefficients = range(1, self.largest + 1)
        for a, b in itertools.combinations(order, 2):
            for p, q in itertools.product(coefficients, repeat=2):
                if math.gcd(p, q) == 1 and self._holds(p * rows[:, a] == q * rows[:, b], weights):
                    paired.add(b)
                    yield _vector(rows.shape[1], {a: p, b: -q})
                    break
        free = [at for at in order if at not in paired][:_FREQUENT]
        for a, b, c in itertools.permutations(free, 3):
            if b < c and self._holds(rows[:, a] == rows[:, b] + rows[:, c], weights):
                yield _vector(rows.shape[1], {a: 1, b: -1, c: -1})

    def _holds(self, where: np.ndarray, weights: Floats) -> bool:
        return bool(weights[where].sum() >= self.support * weights.sum())


def _vector(size: int, entries: dict[int, int]) -> Floats:
    vector = np.zeros(size)
    for at, value in entries.items():
        vector[at] = value
    return vector
