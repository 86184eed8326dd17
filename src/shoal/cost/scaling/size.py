"""How the best model's size grows with data: ``sigma * m ** beta_p``.

Source: Hestness et al., 2017, equation 2; exponents between 0.5 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part


@part
class SizeLaw:
    """Size of the best-fitting model as a function of the size of the training data."""

    parameters: ClassVar[tuple[str, ...]] = ("sigma", "beta_p")
    inputs: ClassVar[int] = 1
    min_points: ClassVar[int] = 4
    increasing: ClassVar[bool] = True

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        return np.asarray(theta_Rp[:, :1] + np.exp(theta_Rp[:, 1:2]) * np.log(x_nk[:, 0]))

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """The regression line."""
        slope, offset = np.polyfit(np.log(x_nk[:, 0]), np.log(y_n), 1)
        return np.array([[offset, np.log(max(slope, 1e-3))]])

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Signed parameters."""
        return {"sigma": float(np.exp(theta_p[0])), "beta_p": float(np.exp(theta_p[1]))}

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """Their logarithms."""
        return np.log([values["sigma"], values["beta_p"]])
