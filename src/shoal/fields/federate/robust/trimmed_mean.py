"""The mean of every coordinate without its largest and smallest numbers.

Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, 2018,
definition 2.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived
from shoal.fields.federate.robust.updates import Attackers, assumed, blocks, sort_columns, usable


@part
class TrimmedMean:
    """Leave out the ``f`` largest and the ``f`` smallest numbers of every coordinate.

    Args:
        f: wrong updates that are assumed; ``auto`` for just under a third.
    """

    f: Attackers = "auto"

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """As many as are assumed, fewer than half."""
        return assumed(self.f, count, (count - 1) // 2, "trimmed_mean", "2 f + 1")

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Sort each coordinate, and take the mean of the middle."""
        given = usable(arrived)
        f = self.covers(len(given))
        factor = np.float32(given.scale / (len(given) - 2 * f))
        parts = []
        for block in blocks(given.deltas):
            first, *others = sort_columns(block)[f : len(given) - f]
            for row in others:
                first += row
            parts.append(first * factor)
        return np.concatenate(parts)
