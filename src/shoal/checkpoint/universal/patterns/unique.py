"""One rank alone holds the parameter: a tensor of a pipeline stage, where tp is 1."""

from __future__ import annotations

from shoal.checkpoint.universal.patterns.whole import Whole
from shoal.checkpoint.universal.protocols import Copies
from shoal.core.parts import part

__all__ = ["Unique"]


@part
class Unique(Whole):
    """Exactly one rank holds it, whole; a second one is an error."""

    @property
    def copies(self) -> Copies:
        """There are none."""
        return "none"

    @property
    def tolerance(self) -> float:
        """There is nothing to compare."""
        return 0.0
