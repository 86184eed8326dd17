"""The way back of the fused operators in Triton; imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rms_norm_grad(
    g: tl.tensor, x: tl.tensor, weight: tl.tensor, dx: tl.tensor, partial: tl.tensor, m: tl.tensor,
    n: tl.tensor, eps: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows of dx, and their share of the gradient of the weight."""
    at = tl.arange(0, BLOCK)
    here = at < n
    w = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for row in range(ROWS):
        i = tl.program_id(0) * ROWS + row
        inside = here & (at * 0 + i < m)
        v = tl.load(x + i * n + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(g + i * n + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(v * v) / n + eps)
        back = scale * scale * scale * tl.sum(d * w * v) / n
        sums += d * scale * v
        tl.store(dx + i * n + at, (d * scale * w - v * back).to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * n + at, sums, mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def swiglu_grad(
    g: tl.tensor, x: tl.tensor, dx: tl.tensor, f: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """A piece of one row of the gradients of gate and up."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < f
    gate = tl.load(x + row * 2 * f + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * f + f + at, mask=here, other=0.0).to(tl.float32)
    d = tl.load(g + row * f + at, mask=here, other=0.0).to(tl.float32)
    sigma = 1.0 / (1.0 + tl.exp(-gate))
    slope = sigma + gate * sigma * (1.0 - sigma)
    tl.store(dx + row * 2 * f + at, (d * up * slope).to(dx.dtype.element_ty), mask=here)
    tl.store(dx + row * 2 * f + f + at, (d * gate * sigma).to(dx.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def rope_grad(
    g: tl.tensor, x: tl.tensor, cos: tl.tensor, sin: tl.tensor, q_norm: tl.tensor,
    k_norm: tl.tensor, partial: tl.tensor, m: tl.tensor, length: tl.tensor, every: tl.tensor,
    heads: tl.tensor, turned: tl.tensor, half: tl.tensor, eps: tl.tensor,
    NORMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One head of ROWS tokens, in place: from the gradient of what was turned to that before."""
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    here = at < half
    wa = tl.zeros((BLOCK,), tl.float32)
    wb = tl.zeros((BLOCK,), tl.float32)
    if NORMS:
        query = here & (at * 0 + head < heads)
        key = here & (at * 0 + head >= heads)
        wa += tl.load(q_norm + at, mask=query, other=0.0).to(tl.float32)
        wb += tl.load(q_norm + half + at, mask=query, other=0.0).to(tl.float32)
        wa += tl.load(k_norm + at, mask=key, other=0.0).to(tl.float32)
        wb += tl.load(k_norm + half + at, mask=key, other=0.0).to(tl.float32)
    sums_a = tl.zeros((BLOCK,), tl.float32)
    sums_b = tl.zeros((BLOCK,), tl.float32)
    for row in range(ROWS):
        i = tl.program_id(0) * ROWS + row
        inside = here & (at * 0 + i < m)
        place = (i * every + head) * 2 * half + at
        ga = tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        gb = tl.load(g + place + half, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + i % length * half + at, mask=inside, other=0.0)
        s = tl.load(sin + i % length * half + at, mask=inside, other=0.0)
        a = ga * c + gb * s
        b = gb * c - ga * s
        if NORMS:
            va = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            vb = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(va * va) + tl.sum(vb * vb)) / (2 * half) + eps)
            dots = tl.sum(a * wa * va) + tl.sum(b * wb * vb)
            back = scale * scale * scale * dots / (2 * half)
            sums_a += a * scale * va
            sums_b += b * scale * vb
            a = a * scale * wa - va * back
            b = b * scale * wb - vb * back
        tl.store(g + place, a.to(g.dtype.element_ty), mask=inside)
        tl.store(g + place + half, b.to(g.dtype.element_ty), mask=inside)
    if NORMS:
        own = partial + (tl.program_id(0) * turned + head) * 2 * half + at
        tl.store(own, sums_a, mask=here)
        tl.store(own + half, sums_b, mask=here)
