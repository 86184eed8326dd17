"""Noise as long as many updates.

Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
2017, section 5 (Gaussian workers).
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
class GaussianNoise(Attack):
    """Send numbers from a normal distribution.

    Args:
        scale: standard deviation, in lengths of the client's own update: the noise is about
            ``scale`` times as long as the update.
    """

    scale: Annotated[float, Gt(0)] = 100.0

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """Another draw for each job."""
        draw = generator(coalition.seed, purpose="gaussian attack", step=job.number)
        deviation = self.scale * float(np.linalg.norm(delta)) / np.sqrt(len(delta))
        return draw.standard_normal(len(delta), np.float32) * np.float32(deviation)
