"""A link that loses a part of every update; what is lost arrives as zeros.

Source: Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using
Convex Optimization, 2024, section 4 (tolerance to communication loss).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class DropCoordinates(Attack):
    """Set some coordinates to zero, drawn anew for each job.

    Args:
        share: of them that are lost.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.1

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """The update with zeros in it."""
        draw = generator(coalition.seed, purpose="lost coordinates", step=job.number)
        kept = draw.random(len(delta), np.float32) >= self.share
        return np.where(kept, delta, np.float32(0))
