"""What the patterns share in which every rank holds all of a parameter."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.checkpoint.universal.protocols import FragmentArrangement, Shape
from shoal.core.boxes import Box
from shoal.core.parts import part
from shoal.parallel.tensor.slices import Slices

__all__ = ["WholePattern"]


@part
class WholePattern:
    """Every rank's tensor is the whole one."""

    @property
    def axes(self) -> tuple[str, ...]:
        """None: what ranks hold is the same along each."""
        return ()

    @property
    def arity(self) -> int:
        """One part."""
        return 1

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        """The one shape that there is."""
        return FragmentArrangement(local[0], [self.cut(name, local[0], counts, ())])

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        """All of it."""
        return Slices(shape, (Box.whole(shape),), replicated=True)
