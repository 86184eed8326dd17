"""The Triton kernels of :mod:`shoal.kernel.fused.triton`; imports Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["rms_norm", "rope", "sample", "swiglu"]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rms_norm(
    x: Any, delta: Any, weight: Any, y: Any, n: Any, eps: Any,
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
    x: Any, cos: Any, sin: Any, position: Any, q_norm: Any, k_norm: Any,
    every: Any, heads: Any, half: Any, eps: Any,
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
def swiglu(x: Any, y: Any, f: Any, BLOCK: tl.constexpr) -> None:
    """A piece of one row of silu(gate) * up."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < f
    gate = tl.load(x + row * 2 * f + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + at, mask=here, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * f + at, out.to(y.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def sample(scores: Any, hot: Any, uniform: Any, out: Any, v: Any, BLOCK: tl.constexpr) -> None:
    """The place in a row of falling scores on which the number falls."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < v
    heat = tl.load(hot + row)
    x = tl.load(scores + row * v + at, mask=here, other=-float("inf")) / heat
    weight = tl.where(here, tl.exp(x - tl.max(x)), 0.0)
    sums = tl.cumsum(weight)
    total = tl.sum(weight)
    aim = tl.load(uniform + row) * total
    passed = tl.sum(((sums <= aim) & here).to(tl.int32))
    tl.store(out + row, tl.minimum(passed, v - 1).to(tl.int64))
