"""All tp ranks hold the same: norms, biases of row-parallel layers, routers."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge

from shoal.checkpoint.universal.patterns.whole import WholePattern
from shoal.checkpoint.universal.protocols import Copies
from shoal.core.parts import part

__all__ = ["ReplicatedPattern"]


@part
class ReplicatedPattern(WholePattern):
    """One of the equal copies is taken.

    Args:
        tolerance: largest difference of an element that is taken for equal; infinite to compare
            nothing.
    """

    tolerance: Annotated[float, Ge(0)] = 0.0

    @property
    def copies(self) -> Copies:
        """They are equal."""
        return "equal"
