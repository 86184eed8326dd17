"""Small floating-point numbers: ``float3_e1m1-g128``, ``float4_e2m1-g32``, ``float8_e4m3-channel``.

A code is a sign, X bits of exponent and Y bits of mantissa, from high to low; N = 1 + X + Y. The
bias is 2^(X-1) - 1, exponent 0 means subnormal. Every code is a number, but for two cases of
old: with 5 bits of exponent the topmost exponent is infinity and NaN, and in e4m3 all ones
below the sign is NaN. Rounding is to nearest, ties to the even code, and beyond the largest
number saturates.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025; Micikevicius et al., FP8 Formats for Deep Learning, 2022; OCP Microscaling
Formats (MX) Specification, 2023.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid, half_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@functools.cache
def magnitudes(exponent: int, mantissa: int) -> tuple[float, ...]:
    """What the codes 0 to the largest finite one mean, sign bit clear; they increase.

    Raises:
        KernelError: there is no such type of at most 8 bits.
    """
    if exponent < 1 or mantissa < 0 or 1 + exponent + mantissa > 8:
        raise KernelError(
            f"float e{exponent}m{mantissa}: expected 1 to 7 bits of exponent and 0 to 6 of "
            "mantissa, with the sign at most 8 together; such as e2m1 or e4m3"
        )
    bias = 2 ** (exponent - 1) - 1
    magnitudes = []
    for code in range(2 ** (exponent + mantissa)):
        power, fraction = code >> mantissa, Fraction(code % 2**mantissa, 2**mantissa)
        # The topmost exponent, or in e4m3 only its last code, is none.
        if exponent == 5 and power == 2**exponent - 1:
            break
        if (exponent, mantissa) == (4, 3) and code == 2**7 - 1:
            break
        scale = Fraction(2) ** (max(power, 1) - bias)
        magnitudes.append(float(scale * (fraction + (power > 0))))
    return tuple(magnitudes)


@functools.cache
def values(exponent: int, mantissa: int) -> tuple[float, ...]:
    """What every code means, 2^N of them; NaN and infinity where a code is no number."""
    positive = list(magnitudes(exponent, mantissa))
    infinite = exponent == 5 and len(positive) < 2 ** (exponent + mantissa)
    if infinite:
        positive.append(float("inf"))
    positive += [float("nan")] * (2 ** (exponent + mantissa) - len(positive))
    return (*positive, *(-value for value in positive))


@functools.cache
def _table(exponent: int, mantissa: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All values, and what lies half way between neighbours of the magnitudes."""
    import torch

    with torch.inference_mode(False):
        whole = torch.tensor(values(exponent, mantissa), dtype=torch.float32, device=device)
        known = torch.tensor(magnitudes(exponent, mantissa), dtype=torch.float64, device=device)
        return whole, ((known[1:] + known[:-1]) / 2).float()


def codes_of(x: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Nearest codes of finite fp32 numbers, uint8; ties to even, beyond the largest saturated."""
    import torch

    _, between = _table(exponent, mantissa, x.device)
    size = x.abs().contiguous()
    below = torch.bucketize(size, between)
    # One more where the number lies exactly half way; the even one of the two is taken.
    above = torch.bucketize(size, between, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code | torch.signbit(x).long() << (exponent + mantissa)).to(torch.uint8)


@part
class Float(BaseFormat):
    """A sign, X bits of exponent, Y bits of mantissa, and an fp16 scale per group.

    Args:
        exponent: bits of the exponent, X.
        mantissa: bits of the mantissa, Y.
        group: weights along K that share a scale; None for all of a row.
    """

    exponent: Annotated[int, Field(ge=1, le=7)] = 2
    mantissa: Annotated[int, Field(ge=0, le=6)] = 1
    group: Annotated[int, Field(ge=1)] | None = 128

    @classmethod
    def read(cls, digits: str, text: str) -> dict[str, object]:
        """Options from ``4_e2m1``.

        Raises:
            KernelError: not of that form, or the bits do not add up.
        """
        match = re.fullmatch(r"(\d)_e(\d)m(\d)", digits)
        if match is None:
            raise KernelError(
                f"weight format {text!r}: expected float, bits, exponent and mantissa, such as "
                "float4_e2m1-g128"
            )
        width, exponent, mantissa = map(int, match.groups())
        magnitudes(exponent, mantissa)
        if width != 1 + exponent + mantissa:
            raise KernelError(
                f"weight format {text!r}: a sign, {exponent} exponent bits and {mantissa} "
                f"mantissa bits are {1 + exponent + mantissa} bits, not {width}; did you mean "
                f"'float{1 + exponent + mantissa}_e{exponent}m{mantissa}'?"
            )
        return {"exponent": exponent, "mantissa": mantissa}

    def _name(self) -> str:
        return f"float{self.code_bits}_e{self.exponent}m{self.mantissa}"

    @property
    def code_bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def largest(self) -> float:
        """The largest number that a code means."""
        return magnitudes(self.exponent, self.mantissa)[-1]

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        return {"scales": half_scale(weight_NGg.abs().amax(-1) * clip / self.largest, self)}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        import torch

        scale = grid["scales"].float()
        return codes_of(weight / torch.where(scale > 0, scale, 1.0), self.exponent, self.mantissa)

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        whole, _ = _table(self.exponent, self.mantissa, codes.device)
        return whole[codes.long()] * grid["scales"].float()
