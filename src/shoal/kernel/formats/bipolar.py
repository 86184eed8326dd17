"""Sums of plus and minus powers of two: ``bipolar2-g128``.

Bit i of a code means +2^i where it is 1 and -2^i where it is 0, so N bits mean the odd
integers from -(2^N - 1) to 2^N - 1: no sign bit, no zero point, no zero. A code u, read as a plain
number, means ``2u - (2^N - 1)``.

Source: Ma et al., Efficient Arbitrary Precision Acceleration for Large Language Models on GPU
Tensor Cores, 2024; the scale of one bit: Rastegari et al., XNOR-Net, 2016, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid, half_scale

if TYPE_CHECKING:
    from torch import Tensor

# Shares of the largest magnitude among which the scale of a group of few bits is sought: the
# largest weights are rare, and with few codes representing them exactly costs all others.
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)


def meant(codes: Tensor, bits: int) -> Tensor:
    """The odd integers that codes mean, int64."""
    integers: Tensor = 2 * codes.long() - (2**bits - 1)
    return integers


def codes_of(integers: Tensor, bits: int) -> Tensor:
    """The codes, uint8, of odd integers of at most 2^bits - 1.

    Raises:
        KernelError: one is even or too large; names the first.
    """
    import torch

    top = 2**bits - 1
    wrong = (integers % 2 == 0) | (integers.abs() > top)
    if bool(wrong.any()):
        place = tuple(int(index) for index in wrong.nonzero()[0])
        raise KernelError(
            f"bipolar{bits}{list(place)} = {int(integers[place])}: expected odd integers from "
            f"{-top} to {top}; {bits} bits of bipolar integers have no other value"
        )
    codes: Tensor = ((integers + top) // 2).to(torch.uint8)
    return codes


@part
class Bipolar(BaseFormat):
    """Odd integers of N bits, and an fp16 scale per group.

    With 1 bit the scale is the mean magnitude; with 2 and 3 bits it is the one of six candidates
    with the smallest squared error; with more bits it maps the largest magnitude to the largest
    code.

    Args:
        width: bits of a code, N.
        group: weights along K that share a scale; None for all of a row.
    """

    width: Annotated[int, Field(ge=1, le=8)] = 2
    group: Annotated[int, Field(ge=1)] | None = 128

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        import torch

        if self.width == 1:
            return {"scales": half_scale(weight_NGg.abs().mean(-1) * clip, self)}
        largest = weight_NGg.abs().amax(-1) * clip / (2**self.width - 1)
        if self.width > 3:
            return {"scales": half_scale(largest, self)}
        best = half_scale(largest, self)
        least = torch.full_like(largest, float("inf"))
        for share in _SHARES:
            tried = half_scale(largest * share, self)
            columns = {"scales": tried[..., None]}
            rounded = self.decode(self.encode(weight_NGg, columns), columns)
            error = (rounded - weight_NGg).square().sum(-1)
            best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
        return {"scales": best}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        import torch

        scale, top = grid["scales"].float(), 2**self.width - 1
        codes = (weight / torch.where(scale > 0, scale, 1.0)).add_(top).mul_(0.5).round_()
        return codes.clamp_(0, top).to(torch.uint8)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        values: Tensor = (2.0 * codes.float() - (2**self.width - 1)) * grid["scales"].float()
        return values
