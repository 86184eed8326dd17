"""A Little Is Enough (ALIE): colluding clients move every coordinate by a few deviations.

These hide among honest updates, and all of them point the same way.

Source: Baruch, Baruch, Goldberg, A Little Is Enough: Circumventing Defenses For Distributed
Learning, 2019, algorithm 3.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt

from shoal.core.parts import part
from shoal.fields.federate.attacks.protocols import Attack, Coalition
from shoal.fields.federate.protocols import LocalJob


@part
class LittleIsEnough(Attack):
    """Send the mean of what the malicious clients have learned, minus ``z`` standard deviations.

    The mean and the deviation are estimated from the malicious clients' own updates.

    Args:
        z: deviations; ``auto`` for the most that the paper derives: so many honest updates are
            farther from the mean that, with the malicious ones, they are a majority.
    """

    z: Annotated[float, Gt(0)] | Literal["auto"] = "auto"

    def poison(self, delta: np.ndarray, job: LocalJob, coalition: Coalition) -> np.ndarray:
        """The same from all of them."""
        updates = coalition.learned()
        shift = most(coalition.clients, len(updates)) if self.z == "auto" else self.z
        mean: np.ndarray = updates.mean(0)
        deviation: np.ndarray = updates.std(0)
        return mean - np.float32(shift) * deviation


def most(clients: int, malicious: int) -> float:
    """Deviations beyond which too few honest updates are left to hide behind; at least 0."""
    honest = clients - malicious
    supporters = max(1, clients // 2 + 1 - malicious)
    return max(0.0, NormalDist().inv_cdf(min(max((honest - supporters) / honest, 1e-9), 1 - 1e-9)))
