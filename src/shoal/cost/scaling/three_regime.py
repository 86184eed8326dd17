"""All three regimes in one smooth formula: best guess, power law, irreducible floor.

``gamma + (epsilon0 - gamma) * (1 + (m / m0) ** (1 / kappa)) ** (beta * kappa)``: up to
about ``m0`` the error stays at the best guess ``epsilon0``; beyond, it falls with the
exponent ``beta``; ``kappa`` says how gently the one becomes the other.

Source: Hestness et al., 2017, figure 6, for the regimes; the formula is a broken power
law, Caballero et al., Broken Neural Scaling Laws, 2023, with one break.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part


@part
class ThreeRegime:
    """A whole learning curve: random guessing, power law, irreducible loss."""

    parameters: ClassVar[tuple[str, ...]] = ("epsilon0", "m0", "beta", "kappa", "gamma")
    inputs: ClassVar[int] = 1
    min_points: ClassVar[int] = 7
    increasing: ClassVar[bool] = False

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        """See :class:`~shoal.cost.scaling.protocols.Law`; theta[0] is log(epsilon0 - gamma)."""
        log_m = np.log(x_nk[:, 0])
        kappa = np.exp(np.clip(theta_Rp[:, 3:4], -4.0, 2.0))
        past = (log_m - theta_Rp[:, 1:2]) / kappa
        drop = -np.exp(theta_Rp[:, 2:3]) * kappa * np.logaddexp(0.0, past)
        return np.asarray(np.logaddexp(theta_Rp[:, :1] + drop, theta_Rp[:, 4:5]))

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """Breaks at several places, floors at several heights."""
        log_m = np.log(x_nk[:, 0])
        order = np.argsort(log_m)
        log_m, y = log_m[order], y_n[order]
        slope = -np.polyfit(log_m, np.log(y), 1)[0]
        results = []
        for quantile in (0.1, 0.3, 0.5):
            for share in (0.05, 0.6, 0.9):
                floor = share * float(y.min())
                results.append(
                    [
                        np.log(y[0] - floor),
                        float(np.quantile(log_m, quantile)),
                        np.log(max(1.5 * slope, 1e-3)),
                        np.log(0.5),
                        np.log(floor),
                    ]
                )
        return np.array(results)

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Signed parameters."""
        gamma = float(np.exp(theta_p[4]))
        return {
            "epsilon0": float(np.exp(theta_p[0])) + gamma,
            "m0": float(np.exp(theta_p[1])),
            "beta": -float(np.exp(theta_p[2])),
            "kappa": float(np.exp(np.clip(theta_p[3], -4.0, 2.0))),
            "gamma": gamma,
        }

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """Their logarithms."""
        return np.log(
            [
                values["epsilon0"] - values["gamma"],
                values["m0"],
                -values["beta"],
                values["kappa"],
                values["gamma"],
            ]
        )
