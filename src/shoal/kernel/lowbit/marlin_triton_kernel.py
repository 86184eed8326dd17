"""The Triton kernel of :mod:`shoal.kernel.lowbit.marlin_triton`; imports Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["w4a16"]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def w4a16(
    x: Any,
    codes: Any,
    scales: Any,
    sums: Any,
    m: Any,
    n: Any,
    k: Any,
    x_row: Any,
    x_column: Any,
    groups_each: Any,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Sums of a part of K: sums [parts, M, N] of x [M, K] and codes [N, K / 2]."""
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    pairs = tl.arange(0, GROUP // 2)
    groups = k // GROUP
    some_rows = rows[:, None] < m
    some_columns = columns[:, None] < n
    total = tl.zeros((16, BLOCK_N), dtype=tl.float32)
    for index in range(groups_each):
        group = part * groups_each + index
        inside = group < groups
        first = group * GROUP
        at = x + rows[:, None] * x_row + (first + 2 * pairs)[None, :] * x_column
        even = tl.load(at, mask=some_rows & inside, other=0.0)
        odd = tl.load(at + x_column, mask=some_rows & inside, other=0.0)
        byte = tl.load(
            codes + columns[:, None] * (k // 2) + (first // 2 + pairs)[None, :],
            mask=some_columns & inside,
            other=0x88,
        )
        low = ((byte & 15).to(tl.int32) - 8).to(x.dtype.element_ty)
        high = ((byte >> 4).to(tl.int32) - 8).to(x.dtype.element_ty)
        found = tl.dot(even, tl.trans(low), input_precision="ieee")
        found += tl.dot(odd, tl.trans(high), input_precision="ieee")
        scale = tl.load(
            scales + columns * groups + group, mask=(columns < n) & inside, other=0.0
        ).to(tl.float32)
        total += found * scale[None, :]
    out = sums + part * m * n + rows[:, None] * n + columns[None, :]
    tl.store(out, total, mask=some_rows & (columns[None, :] < n))
