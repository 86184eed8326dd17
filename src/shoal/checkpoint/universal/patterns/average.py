"""Copies that have drifted apart, because each rank updated its own: their mean is taken."""

from __future__ import annotations

from shoal.checkpoint.universal.patterns.whole import WholePattern
from shoal.checkpoint.universal.protocols import Copies
from shoal.core.parts import part

__all__ = ["AveragePattern"]


@part
class AveragePattern(WholePattern):
    """Norms under sequence parallelism, where their gradients were not summed over tp."""

    @property
    def copies(self) -> Copies:
        """Their mean, summed in double precision."""
        return "mean"

    @property
    def tolerance(self) -> float:
        """Copies may differ by anything."""
        return float("inf")
