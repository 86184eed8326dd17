"""The median of every coordinate.

Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, 2018,
definition 1.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived, FederationError
from shoal.fields.federate.robust.updates import blocks, sort_columns, usable


@part
class Median:
    """The median of every coordinate; of an even number of updates, the middle two's mean."""

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """Fewer than half."""
        if count < 1:
            raise FederationError("robust = median: no update; at least 1 is needed")
        return (count - 1) // 2

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Sort each coordinate."""
        given = usable(arrived)
        self.covers(len(given))
        low, high = (len(given) - 1) // 2, len(given) // 2
        parts = []
        for block in blocks(given.deltas):
            rows = sort_columns(block)
            parts.append((rows[low] + rows[high]) * np.float32(given.scale / 2))
        return np.concatenate(parts)
