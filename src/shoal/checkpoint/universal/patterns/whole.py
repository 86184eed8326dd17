"""Patterns in which every rank that holds a parameter holds all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge

from shoal.checkpoint.universal.protocols import Copies, FragmentArrangement, Shape
from shoal.core.boxes import Box
from shoal.core.parts import part
from shoal.parallel.tensor.slices import Slices


class _Whole:
    axes: ClassVar[tuple[str, ...]] = ()
    arity: ClassVar[int] = 1

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        return FragmentArrangement(local[0], [self.cut(name, local[0], counts, ())])

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        return Slices(shape, (Box.whole(shape),), replicated=True)


@part
class UniquePattern(_Whole):
    """Held by one rank alone, such as a tensor of a stage with tp 1; a second copy is an error."""

    copies: ClassVar[Copies] = "none"
    tolerance: ClassVar[float] = 0.0


@part
class ReplicatedPattern(_Whole):
    """Equal on all tp ranks, such as norms, biases of row-parallel layers and routers.

    Args:
        tolerance: largest difference between elements of two copies; infinite for no comparison.
    """

    copies: ClassVar[Copies] = "equal"
    tolerance: Annotated[float, Ge(0)] = 0.0


@part
class AveragePattern(_Whole):
    """The mean of copies that differ, because each rank updated its own.

    For norms under sequence parallelism whose gradients were not summed over tp. The mean is
    computed in double precision; the difference of the copies is not limited.
    """

    copies: ClassVar[Copies] = "mean"
    tolerance: ClassVar[float] = float("inf")
