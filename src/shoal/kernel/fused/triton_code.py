"""The Triton kernels of :mod:`shoal.kernel.fused.triton`; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rms_norm(
    x: tl.tensor, delta: tl.tensor, weight: tl.tensor, y: tl.tensor, n: tl.tensor, eps: tl.tensor,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row of y = norm(x + delta) * weight; x becomes x + delta."""
    at = tl.arange(0, BLOCK)
    here = at < n
    row = tl.program_id(0) * n
    v = tl.load(x + row + at, mask=here, other=0.0).to(tl.float32)
    if ADDS:
        v += tl.load(delta + row + at, mask=here, other=0.0).to(tl.float32)
        stored = v.to(x.dtype.element_ty)
        tl.store(x + row + at, stored, mask=here)
        v = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v) / n + eps)
    w = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row + at, (v * scale * w).to(y.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rope(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, position: tl.tensor, q_norm: tl.tensor,
    k_norm: tl.tensor, every: tl.tensor, heads: tl.tensor, half: tl.tensor, eps: tl.tensor,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One head of one token, in place."""
    head = tl.program_id(1)
    row = x + (tl.program_id(0) * every + head) * 2 * half
    at = tl.arange(0, BLOCK)
    here = at < half
    a = tl.load(row + at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(row + half + at, mask=here, other=0.0).to(tl.float32)
    if Q_NORM and head < heads:
        scale = 1.0 / tl.sqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * half) + eps)
        a *= scale * tl.load(q_norm + at, mask=here, other=0.0).to(tl.float32)
        b *= scale * tl.load(q_norm + half + at, mask=here, other=0.0).to(tl.float32)
    if K_NORM and head >= heads:
        scale = 1.0 / tl.sqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * half) + eps)
        a *= scale * tl.load(k_norm + at, mask=here, other=0.0).to(tl.float32)
        b *= scale * tl.load(k_norm + half + at, mask=here, other=0.0).to(tl.float32)
    place = tl.load(position + tl.program_id(0)) * half
    c = tl.load(cos + place + at, mask=here, other=0.0)
    s = tl.load(sin + place + at, mask=here, other=0.0)
    tl.store(row + at, (a * c - b * s).to(x.dtype.element_ty), mask=here)
    tl.store(row + half + at, (b * c + a * s).to(x.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def swiglu(x: tl.tensor, y: tl.tensor, f: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A piece of one row of silu(gate) * up."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < f
    gate = tl.load(x + row * 2 * f + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + at, mask=here, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * f + at, out.to(y.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sample(
    scores: tl.tensor,
    hot: tl.tensor,
    uniform: tl.tensor,
    out: tl.tensor,
    v: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """The place in a row of falling scores on which the number falls, a block at a time."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    heat = tl.load(hot + row)
    top = tl.load(scores + row * v) / heat
    total = top * 0
    for first in range(0, v, BLOCK):
        x = tl.load(scores + row * v + first + at, mask=first + at < v, other=-float("inf"))
        total += tl.sum(tl.exp(x / heat - top))
    aim = tl.load(uniform + row) * total
    before = top * 0
    passed = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, v, BLOCK):
        here = first + at < v
        x = tl.load(scores + row * v + first + at, mask=here, other=-float("inf"))
        weight = tl.exp(x / heat - top)
        passed += ((before + tl.cumsum(weight) <= aim) & here).to(tl.int64)
        before += tl.sum(weight)
    tl.store(out + row, tl.minimum(tl.sum(passed), v - 1))
