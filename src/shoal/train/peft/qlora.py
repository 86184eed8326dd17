"""QLoRA: LoRA on a base that is kept in four bits.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, sections 3 and E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.train.peft.lora import Lora

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site


@part
class QLora(Lora):
    """LoRA on a base whose linear layers are stored in NF4 with double quantization.

    A weight takes 4.13 bits. bf16 rows use the 4-bit kernel if the CPU has it and the block is a
    multiple of 32; a weight then takes 4.38 bits. Other rows are multiplied with dequantized tiles
    of the weight; the whole weight is never dequantized. The trained change merges into unquantized
    weights only.

    Differs: scales are rounded to 8-bit integers, where the paper has 8-bit floats.

    Args:
        block: weights that share a scale.
    """

    block: Annotated[int, Ge(2)] = 64
    traits: ClassVar[frozenset[str]] = frozenset({"replaces_base"})
    name: ClassVar[str] = "qlora"

    @property
    def weight_bits(self) -> float:
        """Bits of a weight of the blocks, scales included."""
        return 4 + 8 / self.block + 32 / (256 * self.block)

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        from shoal.train.peft.run.nf4 import quantise

        quantise(handle, self.block)
