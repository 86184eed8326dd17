"""The matrices of all experts in one tensor of three dimensions.

Expert-parallel ranks hold some experts each, tensor-parallel ranks a share of each expert's
width, which may have parts of its own: gate and up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Ge

from shoal.checkpoint.universal.patterns.cuts import parts_of
from shoal.checkpoint.universal.patterns.fused import divided
from shoal.checkpoint.universal.protocols import Copies, FragmentArrangement, Shape
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, require
from shoal.core.parts import part
from shoal.parallel.tensor.slices import Slices


@part
class MoePattern:
    """Experts sharded along one dimension, and their width along another.

    Args:
        expert_dim: dimension of the experts, sharded over ep ranks.
        shard_dim: dimension of the width, sharded over tp ranks.
        parts: sizes of the segments of the width; one segment if not given.
        tolerance: largest difference between copies of a fragment on other ranks.
    """

    expert_dim: int = 0
    shard_dim: int = 1
    parts: tuple[int, ...] = ()
    tolerance: Annotated[float, Ge(0)] = 0.0
    axes: ClassVar[tuple[str, ...]] = ("ep", "tp")
    copies: ClassVar[Copies] = "equal"

    def __post_init__(self) -> None:
        require(
            self.expert_dim >= 0 and self.shard_dim >= 0 and self.expert_dim != self.shard_dim,
            "pattern.moe.shard_dim",
            self.shard_dim,
            expected=f"0 or more, and not expert_dim = {self.expert_dim}",
        )
        require(
            all(extent > 0 for extent in self.parts),
            "pattern.moe.parts",
            self.parts,
            expected="extents above 0, such as [1024, 1024]",
        )

    @property
    def arity(self) -> int:
        return max(1, len(self.parts))

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        """Experts behind each other, and of each the shares of its width."""
        first = local[0]
        for shape in local:
            if shape != first or max(self.expert_dim, self.shard_dim) >= len(shape):
                raise CheckpointError(
                    f"{name}: fragments of {list(first)} and {list(shape)} are no equal shares of "
                    f"experts along dim {self.expert_dim} and width along dim {self.shard_dim}"
                )
        whole = list(first)
        whole[self.expert_dim] *= counts[0]
        whole[self.shard_dim] *= counts[1]
        shape = tuple(whole)
        places = itertools.product(*map(range, counts))
        return FragmentArrangement(shape, [self.cut(name, shape, counts, at) for at in places])

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        experts = shape[self.expert_dim]
        if experts % counts[0]:
            raise CheckpointError(
                f"{name}: {experts} experts cannot be divided by {counts[0]} ep ranks, and experts "
                "are never padded; choose a divisor"
            )
        parts = divided(name, shape, self.shard_dim, self.parts, counts[1])
        held = experts // counts[0]
        boxes = []
        for box in parts_of(shape, self.shard_dim, parts, counts[1], at[1]).boxes:
            offset, size = list(box.offset), list(box.shape)
            offset[self.expert_dim], size[self.expert_dim] = at[0] * held, held
            boxes.append(Box(tuple(offset), tuple(size)))
        return Slices(shape, tuple(boxes), self.shard_dim)
