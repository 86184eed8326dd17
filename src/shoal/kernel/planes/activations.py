"""Rows of activations rounded to bipolar integers: the meaning, in plain torch.

A row has one scale: the largest magnitude is the largest integer; with 1 and 2 bits, where the
largest is far from the rest, the scale of least square error for a normal distribution.

Source: Max, Quantizing for Minimum Distortion, 1960, table II.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.formats.bipolar import meant

# Half the step between two levels, in standard deviations.
_NORMAL = {1: 0.7978846, 2: 0.498}


def bits_of(activations: str) -> int:
    """4 of ``bipolar4``.

    Raises:
        KernelError: anything else than bipolar1 to bipolar8.
    """
    match = re.fullmatch(r"bipolar([1-8])", activations)
    if match is None:
        raise KernelError(f"activations: {activations!r}: expected bipolar1 to bipolar8")
    return int(match[1])


def quantize(x_MK: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [M, K] and scales fp32 [M]; a scale is NaN where the row is not finite."""
    x, top = x_MK.float(), 2**bits - 1
    if bits in _NORMAL:
        scale = _NORMAL[bits] * x.square().mean(-1).sqrt()
    else:
        scale = x.abs().amax(-1) / top
    half = torch.where(scale > 0, 0.5 / scale, 0.0)
    # One rounding, as of a fused multiply-add.
    codes = (x.double() * half[:, None].double() + 0.5 * top).float().round_().clamp_(0, top)
    bad = ~x.isfinite().all(-1)
    return codes.nan_to_num_().to(torch.uint8), scale.masked_fill(bad, float("nan"))


def rounded(x: Tensor, bits: int) -> Tensor:
    """What the rounded rows mean, in the type of x [..., K]."""
    flat = x.reshape(-1, x.shape[-1])
    codes, scale = quantize(flat, bits)
    return (meant(codes, bits) * scale[:, None]).to(x.dtype).view(x.shape)
