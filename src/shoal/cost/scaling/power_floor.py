"""Power law with an irreducible floor: ``alpha * m ** beta + gamma``.

Source: Hestness et al., 2017, equation 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part


@part
class PowerFloor:
    """A power law with an irreducible loss, which needs points near it."""

    parameters: ClassVar[tuple[str, ...]] = ("alpha", "beta", "gamma")
    inputs: ClassVar[int] = 1
    min_points: ClassVar[int] = 5
    increasing: ClassVar[bool] = False

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        falling = theta_Rp[:, :1] - np.exp(theta_Rp[:, 1:2]) * np.log(x_nk[:, 0])
        return np.asarray(np.logaddexp(falling, theta_Rp[:, 2:3]))

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """Regression lines over several guesses of the floor."""
        log_m, least = np.log(x_nk[:, 0]), float(y_n.min())
        results = []
        for share in (0.02, 0.3, 0.6, 0.85, 0.97):
            slope, offset = np.polyfit(log_m, np.log(y_n - share * least), 1)
            results.append([offset, np.log(max(-slope, 1e-3)), np.log(share * least)])
        return np.array(results)

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Signed parameters."""
        alpha, beta, gamma = np.exp(theta_p)
        return {"alpha": float(alpha), "beta": -float(beta), "gamma": float(gamma)}

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """Their logarithms."""
        return np.log([values["alpha"], -values["beta"], values["gamma"]])
