"""The Triton program of :mod:`shoal.fields.graph.gather.triton`; imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gather_rows(
    table: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    base: tl.tensor,
    WARPS: tl.constexpr,
    PLACES: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """One row: 32 lanes, as many iterations as the row has times 32 floats.

    Args:
        table: float32 [N, width].
        rows: int64 [n].
        places: int64 [n].
        out: float32 [., width].
        width: floats of a row.
        base: floats between the beginning of a line and the table.
        WARPS: iterations.
        PLACES: rows go to ``places``.
        ALIGNED: lanes are shifted to the lines of the row.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    place = tl.load(places + number) if PLACES else number
    skew = (base + row * width) % 32 if ALIGNED else row * 0
    lane = tl.arange(0, 32)
    for k in range(WARPS):
        at = 32 * k + lane - skew
        # Lanes before the head of the row take what is behind the last iteration.
        at = tl.where(at < 0, at + 32 * WARPS, at)
        inside = at < width
        value = tl.load(table + row * width + at, mask=inside)
        tl.store(out + place * width + at, value, mask=inside)
