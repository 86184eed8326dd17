"""One rank alone holds the parameter: a tensor of a pipeline stage, where tp is 1."""

from __future__ import annotations

from shoal.checkpoint.universal.patterns.whole import WholePattern
from shoal.checkpoint.universal.protocols import Copies
from shoal.core.parts import part

__all__ = ["UniquePattern"]


@part
class UniquePattern(WholePattern):
    """Exactly one rank holds it, whole; a second one is an error."""

    @property
    def copies(self) -> Copies:
        """There are none."""
        return "none"

    @property
    def tolerance(self) -> float:
        """There is nothing to compare."""
        return 0.0
