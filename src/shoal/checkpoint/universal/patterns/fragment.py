"""Ranks hold runs of rows, columns or the like, one after the other.

Row-parallel matrices along dim 1, column-parallel ones along dim 0, and the vocabulary along
dim 0 with zero rows at its end where the ranks cannot share it evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from shoal.checkpoint.universal.patterns.cuts import others_equal, run
from shoal.checkpoint.universal.protocols import Copies, FragmentArrangement, Shape
from shoal.core.errors import CheckpointError
from shoal.core.parts import part
from shoal.parallel.tensor.slices import Slices


@part
class FragmentPattern:
    """Concatenated along one dimension, in the order of the ranks.

    Args:
        dim: the dimension.
        size: size of the whole tensor in that dimension; fragments beyond it are padding, and a
            tensor that cannot be divided evenly is padded. 0 for no padding.
        multiple: the size of a padded fragment is a multiple of this.
        axis: ranks that share the tensor: tp, or pp where stages share the vocabulary.
        tolerance: largest difference between copies of a fragment on other ranks.
    """

    dim: Annotated[int, Ge(0)] = 0
    size: Annotated[int, Ge(0)] = 0
    multiple: Annotated[int, Ge(1)] = 1
    axis: Literal["tp", "pp", "ep"] = "tp"
    tolerance: Annotated[float, Ge(0)] = 0.0
    copies: ClassVar[Copies] = "equal"
    arity: ClassVar[int] = 1

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def arrange(self, name: str, local: Sequence[Shape], counts: Shape) -> FragmentArrangement:
        """One after the other; what is beyond ``size`` is left out."""
        others_equal(name, local, self.dim)
        extents = [shape[self.dim] for shape in local]
        total = sum(extents)
        if self.size > total:
            raise CheckpointError(
                f"{name}: the fragments have {total} rows along dim {self.dim} together and the "
                f"pattern says size={self.size}; a rank is missing, or the pattern is of another "
                "model"
            )
        whole = list(local[0])
        whole[self.dim] = self.size or total
        shape, start, result = tuple(whole), 0, []
        for extent in extents:
            result.append(run(shape, self.dim, start, extent))
            start += extent
        return FragmentArrangement(shape, result)

    def cut(self, name: str, shape: Shape, counts: Shape, at: Shape) -> Slices:
        """An equal share, the last ones padded if the pattern allows it."""
        extent, ranks = shape[self.dim], counts[0]
        if ranks == 1:
            return run(shape, self.dim, 0, extent)
        if extent % ranks and not self.size:
            raise CheckpointError(
                f"{name}: {extent} along dim {self.dim} cannot be divided by {ranks} {self.axis} "
                "ranks, and its pattern has no size to pad from; choose a divisor, or give "
                f"fragment(dim={self.dim}, size={extent})"
            )
        share = -(-extent // ranks)
        if self.size:
            share += -share % self.multiple
        return run(shape, self.dim, at[0] * share, share)
