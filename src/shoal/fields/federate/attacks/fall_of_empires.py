"""Colluding clients send minus a small multiple of the mean.

It is near enough to be taken for honest, and enough of it turns the descent around.

Source: Xie, Koyejo, Gupta, Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product
Manipulation, 2019.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class FallOfEmpires(Attack):
    """Send minus epsilon times the mean of what the malicious clients have learned.

    Args:
        epsilon: length of what is sent, in lengths of the mean.
    """

    epsilon: Annotated[float, Gt(0)] = 0.5

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """The same from all of them."""
        mean: np.ndarray = coalition.learned().mean(0)
        return np.float32(-self.epsilon) * mean
