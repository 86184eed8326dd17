"""The weighted mean, which one wrong update can spoil."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.aggregate.sums import weighted_sum
from shoal.fields.federate.protocols import Arrived


@part
class Mean:
    """The weighted sum of the updates."""

    linear: ClassVar = True
    folds: ClassVar = True

    def covers(self, count: int) -> int:
        """None: a single update moves the mean as far as it likes."""
        return 0

    def combine(self, arrived: Arrived) -> np.ndarray:
        """One pass over each update."""
        return weighted_sum(arrived.deltas, arrived.weights)
