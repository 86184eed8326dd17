"""Integers with a zero point: ``uint4-g128``, ``uint3-g64``.

``w = (u - z) s`` with a code u of N bits and, for each group, a scale and a code z that means
0. The range of a group always includes 0, so that z is a code.

Source: Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference, 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid, half_scale

if TYPE_CHECKING:
    from torch import Tensor


@part
class Uint(BaseFormat):
    """Asymmetric codes of N bits between the smallest and the largest weight of a group.

    Args:
        width: bits of a code, N.
        group: weights along K that share a scale and a zero point; None for all of a row.
    """

    grid_bits: ClassVar[Mapping[str, int]] = {"scales": 16, "zeros": 8}

    width: Annotated[int, Field(ge=1, le=8)] = 4
    group: Annotated[int, Field(ge=1)] | None = 128

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        """``scales`` fp16 and ``zeros`` uint8."""
        import torch

        low = weight_NGg.amin(-1).clamp(max=0) * clip
        high = weight_NGg.amax(-1).clamp(min=0) * clip
        top = 2**self.width - 1
        scales = half_scale((high - low) / top, self)
        step = scales.float()
        zeros = (-low / torch.where(step > 0, step, 1.0)).round().clamp(0, top)
        return {"scales": scales, "zeros": zeros.to(torch.uint8)}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        """Nearest codes; of a group of zeros, its zero point."""
        import torch

        scale = grid["scales"].float()
        codes = (weight / torch.where(scale > 0, scale, 1.0)).round_() + grid["zeros"]
        return codes.clamp_(0, 2**self.width - 1).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        return (codes.float() - grid["zeros"].float()) * grid["scales"].float()
