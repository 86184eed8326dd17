"""Numbers that have nothing to do with what was learned.

Source: Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using
Convex Optimization, 2024, section 4 (uniformly random gradients).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class RandomUpdate(Attack):
    """Send numbers that are uniform around 0.

    Args:
        scale: largest of them.
    """

    scale: Annotated[float, Gt(0)] = 10.0

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """Another draw for each job."""
        draw = generator(coalition.seed, purpose="random attack", step=job.number)
        return ((2 * draw.random(len(delta), np.float32) - 1) * self.scale).astype(np.float32)
