"""What the formats of the cache share: the types of what is stored, and what cannot be."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.core.native import compiler

__all__ = ["fast", "not_finite", "powers_of_two"]


def fast(x: Tensor) -> bool:
    """Whether the compiled code takes it."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and compiler() is not None
    )


def not_finite(x_NKd: Tensor) -> KernelError:
    """The error that names the first number that no code means."""
    place = [int(i) for i in (~torch.isfinite(x_NKd)).nonzero()[0]]
    return KernelError(
        f"cache: number {x_NKd[tuple(place)].item()} of (token, head, channel) {place}: expected "
        "finite keys and values; look at the model's weights, or use format plain"
    )


def powers_of_two(exponent: Tensor) -> Tensor:
    """2^e in fp64, exactly, for -1022 <= e <= 1023."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
