"""Matrices that tests of kernels share: odd sizes, strides and places in memory."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}

sizes = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 160, 257]))
rows = st.one_of(st.integers(1, 9), st.sampled_from([13, 16, 17, 33]))
ways = st.sampled_from(["plain", "strided", "misaligned"])


def made(shape: tuple[int, ...], dtype: torch.dtype, way: str = "plain", seed: int = 0) -> Tensor:
    """Numbers of a matrix: as they come, every other column of a wider one, or one number in."""
    generator = torch.Generator().manual_seed(seed)
    if way == "strided":
        wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)
        return wide[..., ::2]
    count = int(torch.Size(shape).numel())
    flat = torch.randn(count + 1, generator=generator).to(dtype)
    return flat[1:].view(shape) if way == "misaligned" else flat[:-1].view(shape)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal but for a share of the largest wanted number."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    scale = wanted.double().abs().max().clamp(min=1e-30)
    assert (found.double() - wanted.double()).abs().max() <= tolerance * scale
