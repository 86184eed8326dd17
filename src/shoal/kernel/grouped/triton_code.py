"""The Triton kernels of :mod:`shoal.kernel.grouped.triton`; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def product(
    x: tl.tensor, w: tl.tensor, y: tl.tensor, tiles: tl.tensor, n: tl.tensor, k: tl.tensor,
    w_e: tl.tensor, w_n: tl.tensor, w_k: tl.tensor,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of y[rows, N] = x[rows, K] @ w[expert].T; products in fp32 if WIDEN."""
    tile = tiles + tl.program_id(0) * 3
    # A stack of matrices may have more elements than 32 bits count.
    expert = tl.load(tile).to(tl.int64)
    stop = tl.load(tile + 2).to(tl.int64)
    rows = tl.load(tile + 1).to(tl.int64) + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    matrix = w + expert * w_e
    for first in range(0, k, BLOCK_K):
        here = first + inner < k
        a = tl.load(
            x + rows[:, None] * k + first + inner[None, :],
            mask=(rows[:, None] < stop) & here[None, :],
            other=0.0,
        )
        b = tl.load(
            matrix + outs[None, :].to(tl.int64) * w_n + (first + inner[:, None]).to(tl.int64) * w_k,
            mask=(outs[None, :] < n) & here[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(
        y + rows[:, None] * n + outs[None, :],
        total.to(y.dtype.element_ty),
        mask=(rows[:, None] < stop) & (outs[None, :] < n),
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gradient(
    g: tl.tensor, x: tl.tensor, dw: tl.tensor, begins: tl.tensor, n: tl.tensor, k: tl.tensor,
    WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of dw[expert, N, K] = g[rows, N].T @ x[rows, K]; zero where there are no rows."""
    expert = tl.program_id(0)
    start = tl.load(begins + expert)
    stop = tl.load(begins + expert + 1)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in range(start, stop, BLOCK_M):
        rows = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        a = tl.load(
            g + rows[None, :] * n + outs[:, None],
            mask=(rows[None, :] < stop) & (outs[:, None] < n),
            other=0.0,
        )
        b = tl.load(
            x + rows[:, None] * k + inner[None, :],
            mask=(rows[:, None] < stop) & (inner[None, :] < k),
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    tl.store(
        dw + expert.to(tl.int64) * n * k + outs[:, None].to(tl.int64) * k + inner[None, :],
        total.to(dw.dtype.element_ty),
        mask=(outs[:, None] < n) & (inner[None, :] < k),
    )
