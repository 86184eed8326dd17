"""What a law promises to the fitter, and what a fit promises to its users."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np


class Law(Protocol):
    """A part of kind ``law``: a formula with positive parameters.

    The fitter works on ``theta``, the logarithms of the parameters' sizes, so that a
    parameter cannot change its sign. Shapes: R parameter sets, p parameters, n points,
    k inputs of a point.
    """

    parameters: ClassVar[tuple[str, ...]]
    """Names, in the order of ``theta``."""

    inputs: ClassVar[int]
    """Numbers that a point's place has: 1, or 2 for model size and data."""

    min_points: ClassVar[int]
    """Fewest points from which this law may be fitted."""

    increasing: ClassVar[bool]
    """The value grows with its input (a size law), so a growing curve is no mistake."""

    def log_value(self, theta_Rp: np.ndarray, x_nk: np.ndarray) -> np.ndarray:
        """Logarithm of the law's value, [R, n]."""

    def starts(self, x_nk: np.ndarray, y_n: np.ndarray) -> np.ndarray:
        """Places [S, p] from which the fitter starts."""

    def values(self, theta_p: np.ndarray) -> dict[str, float]:
        """Parameters with their signs, by name."""

    def theta(self, values: Mapping[str, float]) -> np.ndarray:
        """The inverse of :meth:`values`."""
