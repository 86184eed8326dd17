"""The Triton kernel of :mod:`shoal.kernel.lowbit.marlin_triton`; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def w4a16(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    groups_each: tl.tensor,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Sums of a part of K: sums [parts, M, N] of x [M, K] and codes [N, K / 2].

    Products in fp32 if WIDEN.
    """
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    pairs = tl.arange(0, GROUP // 2)
    groups = k // GROUP
    some_rows = rows[:, None] < m
    some_columns = columns[:, None] < n
    total = tl.zeros((16, BLOCK_N), dtype=tl.float32)
    for group in range(part * groups_each, tl.minimum((part + 1) * groups_each, groups)):
        first = group * GROUP
        at = x + rows[:, None] * x_row + (first + 2 * pairs)[None, :] * x_column
        even = tl.load(at, mask=some_rows, other=0.0)
        odd = tl.load(at + x_column, mask=some_rows, other=0.0)
        byte = tl.load(
            codes + columns[:, None] * (k // 2) + (first // 2 + pairs)[None, :],
            mask=some_columns,
            other=0x88,
        )
        if WIDEN:
            even, odd = even.to(tl.float32), odd.to(tl.float32)
        low = ((byte & 15).to(tl.int32) - 8).to(even.dtype)
        high = ((byte >> 4).to(tl.int32) - 8).to(even.dtype)
        result = tl.dot(even, tl.trans(low), input_precision="ieee")
        result += tl.dot(odd, tl.trans(high), input_precision="ieee")
        scale = tl.load(scales + columns * groups + group, mask=columns < n, other=0.0)
        total += result * scale.to(tl.float32)[None, :]
    out = sums + part * m * n + rows[:, None] * n + columns[None, :]
    tl.store(out, total, mask=some_rows & (columns[None, :] < n))
