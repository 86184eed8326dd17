"""FISH Mask: the weights with the most Fisher information are trained, the others stand still.

Source: Sung et al., Training Neural Networks with Fixed Sparse Masks, 2021, equation 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.train.peft.base import EVERY, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class FishMask(SiteMethod):
    """Train the entries of each matrix with the largest squared gradients on some batches.

    The trained parameter is a vector of their changes, so the optimizer has no state for other
    entries.

    Differs: squared gradients are of batches, not of examples, and each matrix has the same share.

    Args:
        share: share of the entries of a matrix that are trained.
        batches: number of steps' batches that are evaluated before the first step.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.01
    batches: Annotated[int, Ge(1)] = 4
    targets: str = EVERY
    traits: ClassVar[frozenset[str]] = frozenset({"reads_base"})
    name: ClassVar[str] = "fishmask"

    def count(self, rows: int, columns: int) -> float:
        return max(1, round(self.share * rows * columns))

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.sparse import SparsePart

        handle.looks = self.batches
        return SparsePart(site, int(self.count(site.rows, site.columns)))
