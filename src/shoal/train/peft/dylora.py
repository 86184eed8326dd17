"""DyLoRA: one LoRA that is good at every rank up to its own.

Source: Valipour et al., DyLoRA: Parameter-Efficient Tuning of Pretrained Models using Dynamic
Search-Free Low Rank Adaptation, 2022, algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.peft.lora import Lora

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class DyLora(Lora):
    """Each step trains the first b of r ranks, with random b: the rank is chosen after training.

    Args:
        use: rank that is used in evaluation and inference; r if not given.
    """

    use: Annotated[int, Ge(1)] | None = None
    name: ClassVar[str] = "dylora"

    def __post_init__(self) -> None:
        require(
            self.use is None or self.use <= self.r,
            "finetune.dylora.use",
            self.use,
            expected=f"a rank from 1 to r = {self.r}",
        )

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.dylora import DyLowRank

        return DyLowRank(
            site,
            self.r,
            self.alpha,
            use=self.use or self.r,
            dropout=self.dropout,
            seed=seed,
        )
