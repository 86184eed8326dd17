"""Attention of many tokens of a prompt over its pages, by the vectors of a CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.paged.blocks import BlockAttention


@part
class PackedPagedAttention(BlockAttention):
    """Blocks of 32 x 32 numbers with AVX-512 bf16 dot products."""

    backend: ClassVar[str] = "packed"
    # See shoal.kernel.linear.packed.
    rate: ClassVar[str] = "fp32"
    compute_share: ClassVar[float] = 1.0
