"""The opposite of what was learned.

Source: Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods, 2019.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class SignFlip(Attack):
    """Send the update with its sign changed.

    Args:
        scale: times its size.
    """

    scale: Annotated[float, Gt(0)] = 1.0

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """Minus the update."""
        return np.float32(-self.scale) * delta
