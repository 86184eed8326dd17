"""DoRA: the direction of a weight changes by LoRA, its size by a vector.

Source: Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024, equations 5 and 11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.lora import Lora

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class Dora(Lora):
    """m (W + scale B A) / |W + scale B A|: nearer to full tuning than LoRA at low rank; slower.

    The norm is over the inputs of each output and is treated as a constant in the gradient.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"reads_base"})
    name: ClassVar[str] = "dora"

    def count(self, rows: int, columns: int) -> float:
        return self.r * (rows + columns) + rows

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.dora import DoraPart

        rows = handle.rows(site)
        return DoraPart(site, rows, self.r, self.scale, dropout=self.dropout, seed=seed)
