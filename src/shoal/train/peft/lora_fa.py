"""LoRA-FA: LoRA with a first matrix that stands still.

Source: Zhang et al., LoRA-FA: Memory-efficient Low-rank Adaptation for Large Language Models
Fine-tuning, 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.lora import Lora

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class LoraFA(Lora):
    """Only B is trained, so the inputs of a layer are not saved for the backward pass."""

    name: ClassVar[str] = "lora_fa"
    # Not the inputs of the layers that it changes.
    kept: ClassVar[float] = 0.94

    def count(self, rows: int, columns: int) -> float:
        return self.r * rows

    def drawn(self, shape: ModelShape) -> float:
        """A [r, columns] of every matrix, which stands still."""
        return self.r * sum(columns for _, columns in self.targeted(shape))

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        return self.low_rank(site, seed, frozen_a=True)
