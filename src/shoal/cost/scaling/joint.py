"""Loss of model size and data together: ``E + A / N ** a + B / D ** b``.

Source: Hoffmann et al., Training Compute-Optimal Large Language Models, 2022, equation 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part


@part
class JointLaw:
    """The loss as a function of model size and training tokens; for planning."""

    parameters: ClassVar[tuple[str, ...]] = ("E", "A", "a", "B", "b")
    inputs: ClassVar[int] = 2
    min_points: ClassVar[int] = 7
    increasing: ClassVar[bool] = False

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        """See :class:`~shoal.cost.scaling.protocols.Law`; a point is (N parameters, D data)."""
        log_N, log_D = np.log(x_nk[:, 0]), np.log(x_nk[:, 1])
        of_model = theta_Rp[:, 1:2] - np.exp(theta_Rp[:, 2:3]) * log_N
        of_data = theta_Rp[:, 3:4] - np.exp(theta_Rp[:, 4:5]) * log_D
        return np.asarray(np.logaddexp(np.logaddexp(theta_Rp[:, :1], of_model), of_data))

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """A grid of floors and exponents; factors so that each term explains half the rest."""
        least, middle = float(y_n.min()), np.exp(np.log(x_nk).mean(0))
        results = []
        for share, a, b in itertools.product((0.3, 0.7, 0.95), (0.15, 0.4), (0.15, 0.4)):
            floor = share * least
            rest = max(float(np.median(y_n)) - floor, 1e-6 * least) / 2
            results.append(
                [
                    np.log(floor),
                    np.log(rest) + a * np.log(middle[0]),
                    np.log(a),
                    np.log(rest) + b * np.log(middle[1]),
                    np.log(b),
                ]
            )
        return np.array(results)

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Signed parameters."""
        return {
            name: float(value) for name, value in zip(self.parameters, np.exp(theta_p), strict=True)
        }

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """Their logarithms."""
        return np.log([values[name] for name in self.parameters])
