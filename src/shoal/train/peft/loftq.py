"""LoftQ: a base in four bits, and a LoRA that begins with what the rounding lost.

Source: Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models, 2023,
algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.train.peft.qlora import QLora

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class LoftQ(QLora):
    """QLoRA initialized so that Q + B A is close to W, which reduces the quantization error.

    Args:
        rounds: rounds of quantizing W - B A and decomposing W - Q.
    """

    rounds: Annotated[int, Ge(1)] = 5
    name: ClassVar[str] = "loftq"

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        from shoal.train.peft.run.nf4 import loftq

        handle.begin = loftq(handle, sites, self.r, self.block, self.rounds)

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        import torch

        made = self.low_rank(site, seed)
        down, up = handle.begin[site.name]
        with torch.no_grad():
            made.lora_A.copy_(down)
            made.lora_B.copy_(up / self.scale)
        return made
