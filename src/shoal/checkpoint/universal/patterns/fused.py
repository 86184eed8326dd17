"""Several matrices in one: queries, keys and values, or gate and up.

Each of them is shared by the ranks by itself, so a rank's tensor is its queries, its keys and
its values behind each other. Fragments that are only put behind each other would interleave
them: a wrong matrix of the right shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge

from shoal.checkpoint.universal.patterns.cuts import others_equal, parts_of
from shoal.checkpoint.universal.protocols import Copies, FragmentArrangement, Shape
from shoal.core.errors import CheckpointError, require
from shoal.core.parts import part
from shoal.parallel.tensor.slices import Slices


@part
class FusedPattern:
    """Segments of one tensor that are sharded separately, such as fused QKV.

    Args:
        parts: size of every segment in the whole tensor; sizes may differ, as with grouped queries.
        dim: dimension along which the segments are concatenated.
        tolerance: largest difference between copies of a fragment on other ranks.
    """

    parts: tuple[int, ...] = ()
    dim: Annotated[int, Ge(0)] = 0
    tolerance: Annotated[float, Ge(0)] = 0.0
    axes: ClassVar[tuple[str, ...]] = ("tp",)
    copies: ClassVar[Copies] = "equal"

    def __post_init__(self) -> None:
        require(
            all(extent > 0 for extent in self.parts),
            "pattern.fused.parts",
            self.parts,
            expected="extents above 0, such as [2048, 256, 256]",
        )

    @property
    def arity(self) -> int:
        return max(1, len(self.parts))

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        others_equal(name, local, self.dim)
        ranks = counts[0]
        whole = list(local[0])
        whole[self.dim] = sum(shape[self.dim] for shape in local)
        shape = tuple(whole)
        return FragmentArrangement(
            shape, [self.cut(name, shape, counts, (at,)) for at in range(ranks)]
        )

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        parts = divided(name, shape, self.dim, self.parts, counts[0])
        return parts_of(shape, self.dim, parts, counts[0], at[0])


def divided(name: str, shape: Shape, dim: int, parts: Sequence[int], ranks: int) -> Sequence[int]:
    """The parts of a tensor, which ``ranks`` can share.

    Raises:
        CheckpointError: they are not the tensor, or cannot be shared.
    """
    parts = parts or (shape[dim],)
    if sum(parts) != shape[dim]:
        raise CheckpointError(
            f"{name}: parts {list(parts)} make {sum(parts)} along dim {dim}, and the tensor has "
            f"{shape[dim]}; give the parts of this model"
        )
    for extent in parts:
        if extent % ranks:
            raise CheckpointError(
                f"{name}: a part of {extent} along dim {dim} cannot be divided by {ranks} tp "
                "ranks, and fused parts are never padded; choose a divisor of every part of "
                f"{list(parts)}"
            )
    return parts
