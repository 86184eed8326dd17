"""Triton kernels of the recurrence: the matrices of a head stay on chip for all steps.

A program owns one head and a block of rows of the batch. ``FN`` is the function: 0 lstm, 1 gru,
2 elman, 3 slstm. Units are filled up with zeros to ``DP``, a power of two. Compare
``native/recurrence.h``, which computes the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tanh(x: tl.tensor) -> tl.tensor:
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_sigmoid(x: tl.tensor) -> tl.tensor:
    return tl.minimum(x, 0.0) - tl.log(1 + tl.exp(-tl.abs(x)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _matrix(
    r: tl.tensor,
    g: tl.tensor,
    n: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    across: tl.constexpr,
    WIDEN: tl.constexpr,
    DP: tl.constexpr,
) -> tl.tensor:
    """[inputs, outputs] of gate g, or the other way round; in fp32 if WIDEN."""
    a, b = tl.arange(0, DP)[:, None], tl.arange(0, DP)[None, :]
    out, inner = (b, a) if across else (a, b)
    matrix = tl.load(r + ((g * N + n) * D + out) * D + inner, mask=(a < D) & (b < D), other=0.0)
    if WIDEN:
        matrix = matrix.to(tl.float32)
    return matrix


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def forward(
    wx: tl.tensor,
    r: tl.tensor,
    bias: tl.tensor,
    s0: tl.tensor,
    h: tl.tensor,
    rest: tl.tensor,
    gates: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    FN: tl.constexpr,
    WIDEN: tl.constexpr,
    KEEP: tl.constexpr,
    BB: tl.constexpr,
    DP: tl.constexpr,
) -> None:
    """All steps of one head and BB rows."""
    n = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * BB + tl.arange(0, BB)).to(tl.int64)[:, None]
    cols = tl.arange(0, DP)[None, :]
    real = (rows < B) & (cols < D)
    ND = N * D
    at = n * D + cols
    plane = B * T * ND
    IN: tl.constexpr = 3 if FN == 1 else (1 if FN == 2 else 4)
    r0 = _matrix(r, 0, n, N, D, True, WIDEN, DP)
    b0 = tl.load(bias + at, mask=cols < D, other=0.0)
    now = tl.load(s0 + rows * ND + at, mask=real, other=0.0)
    if FN != 2:
        r1 = _matrix(r, 1, n, N, D, True, WIDEN, DP)
        r2 = _matrix(r, 2, n, N, D, True, WIDEN, DP)
        b1 = tl.load(bias + ND + at, mask=cols < D, other=0.0)
        b2 = tl.load(bias + 2 * ND + at, mask=cols < D, other=0.0)
        b3 = tl.load(bias + 3 * ND + at, mask=cols < D, other=0.0)
    if FN == 0 or FN == 3:
        r3 = _matrix(r, 3, n, N, D, True, WIDEN, DP)
        c = tl.load(s0 + (B + rows) * ND + at, mask=real, other=0.0)
    if FN == 3:
        norm = tl.load(s0 + (2 * B + rows) * ND + at, mask=real, other=0.0)
        top = tl.load(s0 + (3 * B + rows) * ND + at, mask=real, other=0.0)
    for t in range(T):
        step = (rows * T + t).to(tl.int64)
        x = wx + step * IN * ND + at
        kept = gates + step * 4 * ND + at
        low = now.to(r0.dtype)
        p0 = tl.dot(low, r0, input_precision="ieee") + b0
        x0 = tl.load(x, mask=real, other=0.0).to(tl.float32)
        if FN == 2:
            now = _tanh(p0 + x0)
        else:
            p1 = tl.dot(low, r1, input_precision="ieee") + b1
            p2 = tl.dot(low, r2, input_precision="ieee") + b2
            x1 = tl.load(x + ND, mask=real, other=0.0).to(tl.float32)
            x2 = tl.load(x + 2 * ND, mask=real, other=0.0).to(tl.float32)
            if FN == 1:
                k1, k2 = tl.sigmoid(p1 + x0), tl.sigmoid(p2 + x1)
                k0, k3 = p0, _tanh(b3 + x2 + k1 * p0)
                now = k2 * now + (1 - k2) * k3
            else:
                x3 = tl.load(x + 3 * ND, mask=real, other=0.0).to(tl.float32)
                p3 = tl.dot(low, r3, input_precision="ieee") + b3 + x3
                p0, p1, p2 = p0 + x0, p1 + x1, p2 + x2
                if FN == 0:
                    k0, k1, k2, k3 = tl.sigmoid(p0), tl.sigmoid(p1), _tanh(p2), tl.sigmoid(p3)
                    c = k1 * c + k0 * k2
                    now = k3 * _tanh(c)
                else:
                    k0, k1, k2, k3 = p0, p1, p2, p3
                    a = _log_sigmoid(p1) + top
                    new = tl.where(norm == 0, p0, tl.maximum(a, p0))
                    i, f = tl.exp(p0 - new), tl.exp(tl.minimum(a - new, 0.0))
                    c = f * c + i * _tanh(p2)
                    norm = tl.maximum(f * norm + i, 1.0)
                    top = new
                    now = tl.sigmoid(p3) * c / norm
            if KEEP:
                tl.store(kept, k0, mask=real)
                tl.store(kept + ND, k1, mask=real)
                tl.store(kept + 2 * ND, k2, mask=real)
                tl.store(kept + 3 * ND, k3, mask=real)
        tl.store(h + step * ND + at, now, mask=real)
        if FN == 0 or FN == 3:
            tl.store(rest + step * ND + at, c, mask=real)
        if FN == 3:
            tl.store(rest + plane + step * ND + at, norm, mask=real)
            tl.store(rest + 2 * plane + step * ND + at, top, mask=real)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _before(
    s0: tl.tensor,
    all_states: tl.tensor,
    s: tl.tensor,
    t: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    B: tl.tensor,
    ND: tl.tensor,
    at: tl.tensor,
    real: tl.tensor,
) -> tl.tensor:
    """A state before step t."""
    if t == 0:
        loaded = tl.load(s0 + (s * B + rows) * ND + at, mask=real, other=0.0)
    else:
        loaded = tl.load(all_states + (rows * T + t - 1) * ND + at, mask=real, other=0.0)
    return loaded


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def backward(
    r: tl.tensor,
    s0: tl.tensor,
    h: tl.tensor,
    rest: tl.tensor,
    gates: tl.tensor,
    dh: tl.tensor,
    drest: tl.tensor,
    dlast: tl.tensor,
    dwx: tl.tensor,
    dextra: tl.tensor,
    ds0: tl.tensor,
    clip: tl.tensor,
    B: tl.tensor,
    T: tl.tensor,
    N: tl.tensor,
    D: tl.tensor,
    FN: tl.constexpr,
    WIDEN: tl.constexpr,
    BB: tl.constexpr,
    DP: tl.constexpr,
) -> None:
    """Gradients of the gates' inputs, from the last step to the first."""
    n = tl.program_id(0).to(tl.int64)
    rows = (tl.program_id(1) * BB + tl.arange(0, BB)).to(tl.int64)[:, None]
    cols = tl.arange(0, DP)[None, :]
    real = (rows < B) & (cols < D)
    ND = N * D
    at = n * D + cols
    plane = B * T * ND
    IN: tl.constexpr = 3 if FN == 1 else (1 if FN == 2 else 4)
    r0 = _matrix(r, 0, n, N, D, False, WIDEN, DP)
    if FN != 2:
        r1 = _matrix(r, 1, n, N, D, False, WIDEN, DP)
        r2 = _matrix(r, 2, n, N, D, False, WIDEN, DP)
    if FN == 0 or FN == 3:
        r3 = _matrix(r, 3, n, N, D, False, WIDEN, DP)
    d0 = tl.load(dlast + rows * ND + at, mask=real, other=0.0)
    if FN == 0 or FN == 3:
        d1 = tl.load(dlast + (B + rows) * ND + at, mask=real, other=0.0)
    if FN == 3:
        d2 = tl.load(dlast + (2 * B + rows) * ND + at, mask=real, other=0.0)
        d3 = tl.load(dlast + (3 * B + rows) * ND + at, mask=real, other=0.0)
    for back in range(T):
        t = T - 1 - back
        step = (rows * T + t).to(tl.int64)
        out = dwx + step * IN * ND + at
        kept = gates + step * 4 * ND + at
        d0 += tl.load(dh + step * ND + at, mask=real, other=0.0)
        if FN == 2:
            now = tl.load(h + step * ND + at, mask=real, other=0.0)
            g0 = d0 * (1 - now * now)
            tl.store(out, g0, mask=real)
            direct = d0 * 0
        else:
            k0 = tl.load(kept, mask=real, other=0.0)
            k1 = tl.load(kept + ND, mask=real, other=0.0)
            k2 = tl.load(kept + 2 * ND, mask=real, other=0.0)
            k3 = tl.load(kept + 3 * ND, mask=real, other=0.0)
            if FN == 1:
                old = _before(s0, h, 0, t, rows, T, B, ND, at, real)
                dn = d0 * (1 - k2) * (1 - k3 * k3)
                g0 = dn * k1
                g1 = dn * k0 * k1 * (1 - k1)
                g2 = d0 * (old - k3) * k2 * (1 - k2)
                tl.store(dextra + step * ND + at, g0, mask=real)
                tl.store(out, g1, mask=real)
                tl.store(out + ND, g2, mask=real)
                tl.store(out + 2 * ND, dn, mask=real)
                direct = d0 * k2
            else:
                direct = d0 * 0
                old_c = _before(s0, rest, 1, t, rows, T, B, ND, at, real)
                c = tl.load(rest + step * ND + at, mask=real, other=0.0)
                d1 += tl.load(drest + step * ND + at, mask=real, other=0.0)
                if FN == 0:
                    tc = _tanh(c)
                    dc = d1 + d0 * k3 * (1 - tc * tc)
                    g0 = dc * k2 * k0 * (1 - k0)
                    g1 = dc * old_c * k1 * (1 - k1)
                    g2 = dc * k0 * (1 - k2 * k2)
                    g3 = d0 * tc * k3 * (1 - k3)
                    d1 = dc * k1
                else:
                    d2 += tl.load(drest + plane + step * ND + at, mask=real, other=0.0)
                    d3 += tl.load(drest + 2 * plane + step * ND + at, mask=real, other=0.0)
                    old_n = _before(s0, rest + plane, 2, t, rows, T, B, ND, at, real)
                    old_m = _before(s0, rest + 2 * plane, 3, t, rows, T, B, ND, at, real)
                    norm = tl.load(rest + plane + step * ND + at, mask=real, other=1.0)
                    top = tl.load(rest + 2 * plane + step * ND + at, mask=real, other=0.0)
                    a = _log_sigmoid(k1) + old_m
                    i, f = tl.exp(k0 - top), tl.exp(tl.minimum(a - top, 0.0))
                    z, o = _tanh(k2), tl.sigmoid(k3)
                    dc = d1 + d0 * o / norm
                    dn = tl.where(f * old_n + i < 1, 0.0, d2 - d0 * o * c / (norm * norm))
                    di = (dc * z + dn) * i
                    df = (dc * old_c + dn * old_n) * f
                    dm = d3 - di - df
                    to_a = tl.where(a > k0, 1.0, tl.where(a == k0, 0.5, 0.0))
                    to_a = tl.where(old_n == 0, 0.0, to_a)
                    da = tl.where(old_n == 0, 0.0, df + to_a * dm)
                    g0 = di + (1 - to_a) * dm
                    g1 = da * tl.sigmoid(-k1)
                    g2 = dc * i * (1 - z * z)
                    g3 = d0 * c / norm * o * (1 - o)
                    d1, d2, d3 = dc * f, dn * f, da
                tl.store(out, g0, mask=real)
                tl.store(out + ND, g1, mask=real)
                tl.store(out + 2 * ND, g2, mask=real)
                tl.store(out + 3 * ND, g3, mask=real)
        through = tl.dot(g0.to(r0.dtype), r0, input_precision="ieee")
        if FN != 2:
            through += tl.dot(g1.to(r0.dtype), r1, input_precision="ieee")
            through += tl.dot(g2.to(r0.dtype), r2, input_precision="ieee")
        if FN == 0 or FN == 3:
            through += tl.dot(g3.to(r0.dtype), r3, input_precision="ieee")
        if clip > 0:
            through = tl.minimum(tl.maximum(through, -clip), clip)
        d0 = direct + through
    tl.store(ds0 + rows * ND + at, d0, mask=real)
    if FN == 0 or FN == 3:
        tl.store(ds0 + (B + rows) * ND + at, d1, mask=real)
    if FN == 3:
        tl.store(ds0 + (2 * B + rows) * ND + at, d2, mask=real)
        tl.store(ds0 + (3 * B + rows) * ND + at, d3, mask=real)
