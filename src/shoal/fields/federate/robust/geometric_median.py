"""The point with the smallest sum of distances to all updates.

Source: Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, 2022, algorithm 2
(the smoothed Weiszfeld iteration).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived, FederationError
from shoal.fields.federate.robust.updates import distances, usable


@part
class GeometricMedian:
    """The geometric median, by iteratively reweighted means.

    Args:
        iterations: at most.
        tolerance: relative change of the sum of distances at which they end.
    """

    iterations: Annotated[int, Ge(1)] = 1000
    tolerance: Annotated[float, Gt(0)] = 1e-12

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """Fewer than half."""
        if count < 1:
            raise FederationError("robust = geometric_median: no update; at least 1 is needed")
        return (count - 1) // 2

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Coefficients of the updates from their distances alone; updates are read twice."""
        given = usable(arrived)
        self.covers(len(given))
        return given.sum(self.coefficients(distances(given.deltas)))

    def coefficients(self, apart: np.ndarray) -> np.ndarray:
        """Of each update in the median, [n]; ``apart`` has squared distances, [n, n]."""
        count = len(apart)
        share = np.full(count, 1 / count)
        before = np.inf
        # A distance below this is rounding; it would divide by zero.
        least = 1e-9 * np.sqrt(np.median(apart)) or 1e-30
        for _ in range(self.iterations):
            # |g_i - z|^2 for z = sum of share_j g_j.
            to = np.sqrt(np.maximum(apart @ share - share @ apart @ share / 2, 0.0))
            total = float(to.sum())
            if before - total <= self.tolerance * total:
                break
            before = total
            share = 1 / np.maximum(to, least)
            share /= share.sum()
        return share
