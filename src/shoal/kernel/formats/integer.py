"""Symmetric integers: ``int4-g128``, ``int4-channel``, ``int4-2:4``.

``w = (q - 2^(N-1)) s`` with a code q of N bits and ``s = 2 max|w| / (2^N - 1)`` for each
group: the largest magnitude lies half a step beyond one end of the codes or on the other.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024, section 3; two of four: Mishra et al., Accelerating Sparse Deep Neural
Networks, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid, half_scale

if TYPE_CHECKING:
    from torch import Tensor


@part
class Int(BaseFormat):
    """Symmetric codes of N bits, and an fp16 scale per group.

    Args:
        width: bits of a code, N.
        group: weights along K that share a scale; None for all of a row.
        half: 2:4 sparsity: only two of every four weights along K are kept (``-2:4``).
    """

    width: Annotated[int, Field(ge=1, le=8)] = 4
    group: Annotated[int, Field(ge=1)] | None = 128
    half: bool = False

    def __str__(self) -> str:
        text = f"int{self.width}"
        if self.half and self.group == 128:
            return f"{text}-2:4"
        text += "-channel" if self.group is None else f"-g{self.group}"
        return f"{text}-2:4" if self.half else text

    @property
    def keeps_half(self) -> bool:
        return self.half

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        largest = weight_NGg.abs().amax(-1) * clip
        return {"scales": half_scale(largest * (2.0 / (2**self.width - 1)), self)}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        """Nearest codes; of a group of zeros, the code of zero."""
        import torch

        scale = grid["scales"].float()
        codes = (weight / torch.where(scale > 0, scale, 1.0)).round_().add_(2 ** (self.width - 1))
        return codes.clamp_(0, 2**self.width - 1).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        values: Tensor = (codes.float() - 2 ** (self.width - 1)) * grid["scales"].float()
        return values
