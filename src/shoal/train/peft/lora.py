"""LoRA: a low-rank change beside frozen weights.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.train.peft.base import ATTENTION, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.low_rank import LowRank
    from shoal.train.peft.run.sites import Site, SitePart


@part
class Lora(SiteMethod):
    """W + (alpha / r) B A, with random A and zero B: the usual choice.

    Args:
        r: rank of the change.
        alpha: the change is multiplied by alpha / r.
        dropout: share of the inputs of A that is dropped in training.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    r: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    targets: str = ATTENTION
    name: ClassVar[str] = "lora"

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.r

    def count(self, rows: int, columns: int) -> float:
        return self.r * (rows + columns)

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        return self.low_rank(site, seed)

    def low_rank(self, site: Site, seed: int, *, frozen_a: bool = False) -> LowRank:
        """The product beside a layer; with ``frozen_a`` only B is trained."""
        from shoal.train.peft.run.low_rank import LowRank

        return LowRank(
            site,
            self.r,
            self.scale,
            dropout=self.dropout,
            frozen_a=frozen_a,
            seed=seed,
            where=f"finetune.{self.name}.r",
        )
