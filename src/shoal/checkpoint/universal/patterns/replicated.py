"""All tp ranks hold the same: norms, biases of row-parallel layers, routers."""

from __future__ import annotations

from shoal.checkpoint.universal.patterns.whole import WholePattern
from shoal.checkpoint.universal.protocols import Copies
from shoal.core.errors import require
from shoal.core.parts import part

__all__ = ["ReplicatedPattern"]


@part
class ReplicatedPattern(WholePattern):
    """One of the equal copies is taken.

    Args:
        tolerance: largest difference of an element that is taken for equal; infinite to compare
            nothing.
    """

    tolerance: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.tolerance >= 0,
            "pattern.replicated.tolerance",
            self.tolerance,
            expected="0 or more",
        )

    @property
    def copies(self) -> Copies:
        """They are equal."""
        return "equal"
