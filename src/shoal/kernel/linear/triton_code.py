"""The Triton kernel of :mod:`shoal.kernel.linear.triton`; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def product(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """y[M, N] = x[M, K] @ w[N, K].T + bias[N], one tile; products in fp32 if WIDEN."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, k, BLOCK_K):
        here = first + inner < k
        a = tl.load(
            x + rows[:, None] * k + first + inner[None, :],
            mask=(rows[:, None] < m) & here[None, :],
            other=0.0,
        )
        b = tl.load(
            w + outs[None, :] * k + first + inner[:, None],
            mask=(outs[None, :] < n) & here[:, None],
            other=0.0,
        )
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total += tl.dot(a, b, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=outs < n, other=0.0)[None, :]
    tl.store(
        y + rows[:, None] * n + outs[None, :],
        total.to(y.dtype.element_ty),
        mask=(rows[:, None] < m) & (outs[None, :] < n),
    )
