"""Adam's scaling of an estimate of the operator, for networks; a heuristic without guarantees.

Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; Gidel et al., A Variational
Inequality Perspective on Generative Adversarial Networks, 2019 (with extragradient).
"""

from __future__ import annotations

import numpy as np

_FIRST, _SECOND, _SMALL = 0.9, 0.999, 1e-8


class AdamMoments:
    """Running means of an estimate and of its square.

    Args:
        size: of the vector.
        used: whether vectors are scaled at all.
    """

    def __init__(self, size: int, *, used: bool) -> None:
        self._used = used
        self._first, self._second = (np.zeros(size if used else 0) for _ in range(2))
        self._count = 0

    def tried(self, estimate: np.ndarray) -> np.ndarray:
        """Adam's direction with an estimate, for the trial step; moments stay as they are."""
        return self._direction(estimate)[0] if self._used else estimate

    def added(self, estimate: np.ndarray) -> np.ndarray:
        """Adam's direction with an estimate, which goes into the moments."""
        if not self._used:
            return estimate
        direction, self._first, self._second = self._direction(estimate)
        self._count += 1
        return direction

    def _direction(self, estimate: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The direction, and both moments with the estimate."""
        first = self._first + (1 - _FIRST) * (estimate - self._first)
        second = self._second + (1 - _SECOND) * (estimate**2 - self._second)
        count = self._count + 1
        root = np.sqrt(second / (1 - _SECOND**count)) + _SMALL
        return first / (1 - _FIRST**count) / root, first, second
