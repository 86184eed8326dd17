"""Krum: the one update that is nearest to its neighbours.

Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
2017.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived
from shoal.fields.federate.robust.updates import (
    Attackers,
    assumed,
    distances,
    krum_best,
    usable,
)


@part
class Krum:
    """Take one update as it is: that with the smallest sum of distances to its nearest others.

    Args:
        f: wrong updates that are assumed; ``auto`` for just under a third.
    """

    f: Attackers = "auto"

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """As many as are assumed; n >= 2 f + 3."""
        return assumed(self.f, count, (count - 3) // 2, "krum", "2 f + 3")

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Scores from one Gram matrix."""
        given = usable(arrived)
        f = self.covers(len(given))
        best = krum_best(distances(given.deltas), f)
        arrived.report["chosen"] = [given.clients[best]]
        return given.deltas[best] * np.float32(given.scale)
