"""What was learned, many times over: a client that wants to replace the model.

Source: Bagdasaryan et al., How To Backdoor Federated Learning, 2020, section 4.2.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class Scaled(Attack):
    """Send the update times a factor.

    Args:
        factor: of the update.
    """

    factor: Annotated[float, Gt(0)] = 100.0

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """The update, many times."""
        return np.float32(self.factor) * delta
