"""The Triton program of :mod:`shoal.kernel.planes.triton`; imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _values(
    planes: tl.tensor,
    rows: tl.tensor,
    some: tl.tensor,
    k: tl.tensor,
    inside: tl.tensor,
    words: tl.tensor,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    ALL: tl.constexpr,
) -> tl.tensor:
    """int8 [rows, k]: the sum of planes FROM to TO - 1, the first counted as 1; 0 outside."""
    value = tl.zeros((rows.shape[0], k.shape[0]), tl.int32)
    for i in tl.static_range(FROM, TO):
        at = planes + (rows[:, None] * ALL + i) * words + (k // 32)[None, :]
        word = tl.load(at, mask=some[:, None] & inside[None, :], other=0)
        bit = (word >> (k % 32)[None, :]) & 1
        value += (2 * bit - 1) << (i - FROM)
    return tl.where(inside[None, :], value, 0).to(tl.int8)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def planes_product(
    x: tl.tensor,
    w: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    words: tl.tensor,
    A: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One tile of the result. Of eight planes, the topmost is a value of its own.

    Args:
        x: int32 [m, A, words].
        w: int32 [n, W, words].
        out: [m, n], int64 if WIDE, else int32.
        m: rows of x.
        n: rows of w.
        k: numbers of a row.
        words: of a plane of a row, 32 bits each.
        A: planes of x.
        W: planes of w.
        BM: rows of the tile.
        BN: outputs of the tile.
        BK: numbers multiplied at a time.
        WIDE: add in 64 bits.
    """
    A7: tl.constexpr = 7 if A == 8 else A
    W7: tl.constexpr = 7 if W == 8 else W
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    outs = tl.program_id(1) * BN + tl.arange(0, BN)
    some, them = rows < m, outs < n
    total = tl.zeros((BM, BN), tl.int64 if WIDE else tl.int32)
    for start in range(0, k, BK):
        at = start + tl.arange(0, BK)
        inside = at < k
        x_low = _values(x, rows, some, at, inside, words, 0, A7, A)
        w_low = tl.trans(_values(w, outs, them, at, inside, words, 0, W7, W))
        part = tl.dot(x_low, w_low, out_dtype=tl.int32)
        if A == 8:
            x_high = _values(x, rows, some, at, inside, words, 7, 8, A)
            part += tl.dot(x_high, w_low, out_dtype=tl.int32) << 7
        if W == 8:
            w_high = tl.trans(_values(w, outs, them, at, inside, words, 7, 8, W))
            part += tl.dot(x_low, w_high, out_dtype=tl.int32) << 7
            if A == 8:
                part += tl.dot(x_high, w_high, out_dtype=tl.int32) << 14
        total += part
    place = out + rows[:, None].to(tl.int64) * n + outs[None, :]
    tl.store(place, total, mask=some[:, None] & them[None, :])
