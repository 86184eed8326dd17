"""Block floating point: ``bfp8-g32``.

All numbers of a block share one exponent ``e = floor(log2 max|w|)`` of 8 bits; each has a
mantissa of N bits, sign included: ``w = q 2^(e - (N - 2))`` with q from -(2^(N-1) - 1) to
2^(N-1) - 1.

Source: Trukhanov and Soloveychik, Accurate Block Quantization in LLMs with Outliers, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid

if TYPE_CHECKING:
    from torch import Tensor


@part
class Bfp(BaseFormat):
    """Block floating point: mantissas of N bits (code ``q + 2^(N-1)``), and an exponent per block.

    Args:
        width: bits of a mantissa, N, sign included.
        group: weights along K of one block; None for all of a row.
    """

    grid_bits: ClassVar[Mapping[str, int]] = {"exponents": 8}

    width: Annotated[int, Field(ge=2, le=8)] = 8
    group: Annotated[int, Field(ge=1)] | None = 32

    @classmethod
    def read(cls, digits: str, text: str) -> dict[str, object]:
        """Options from the width.

        Raises:
            KernelError: that is no width of this format.
        """
        if digits == "1":
            raise KernelError(f"weight format {text!r}: a mantissa has 2 to 8 bits; give bfp2")
        return super().read(digits, text)

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        """``exponents`` int8; -127 where all is zero."""
        import torch

        # frexp: x = m 2^e with m in [1/2, 1), so floor(log2 x) = e - 1, exactly.
        _, exponent = torch.frexp(weight_NGg.abs().amax(-1) * clip)
        exponent = torch.where(weight_NGg.abs().amax(-1) * clip > 0, exponent - 1, -127)
        return {"exponents": exponent.clamp(-127, 127).to(torch.int8)}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        import torch

        top = 2 ** (self.width - 1) - 1
        # In fp64, whose exponents reach further than those of a block.
        step = torch.exp2(grid["exponents"].double() - (self.width - 2))
        mantissas: Tensor = (weight.double() / step).round_().clamp_(-top, top)
        return mantissas.add_(top + 1).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        import torch

        step = torch.exp2(grid["exponents"].double() - (self.width - 2))
        mantissas: Tensor = codes.double() - 2 ** (self.width - 1)
        return (mantissas * step).float()
