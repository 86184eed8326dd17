"""Pure power law: ``alpha * m ** beta`` with ``beta`` below zero.

Source: Hestness et al., Deep Learning Scaling is Predictable, Empirically, 2017, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part


@part
class PowerLaw:
    """A power law, for the middle of a learning curve, without a plateau or an irreducible loss."""

    parameters: ClassVar[tuple[str, ...]] = ("alpha", "beta")
    inputs: ClassVar[int] = 1
    min_points: ClassVar[int] = 4
    increasing: ClassVar[bool] = False

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        log_m = np.log(x_nk[:, 0])
        return np.asarray(theta_Rp[:, :1] - np.exp(theta_Rp[:, 1:2]) * log_m)

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """The regression line."""
        slope, offset = np.polyfit(np.log(x_nk[:, 0]), np.log(y_n), 1)
        return np.array([[offset, np.log(max(-slope, 1e-3))]])

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Signed parameters."""
        return {"alpha": float(np.exp(theta_p[0])), "beta": -float(np.exp(theta_p[1]))}

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """Their logarithms."""
        return np.log([values["alpha"], -values["beta"]])
