"""The Triton program of :mod:`shoal.kernel.strided.triton`; imports triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def move(
    strided: tl.tensor,
    packed: tl.tensor,
    total: tl.tensor,
    c0: tl.tensor,
    c1: tl.tensor,
    s1: tl.tensor,
    s2: tl.tensor,
    BLOCK: tl.constexpr,
    PLANES: tl.constexpr,
    PACK: tl.constexpr,
) -> None:
    """Words of one plane (2-D), or of several (PLANES, 3-D), packed word by packed word.

    Args:
        strided: words, from the first word of the layout on.
        packed: words.
        total: words to move.
        c0: words of a block.
        c1: blocks of a plane.
        s1: words from block to block.
        s2: words from plane to plane.
        BLOCK: words of a program.
        PLANES: there are several planes.
        PACK: into ``packed``; else out of it.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    block = at // c0
    place = at - block * c0
    if PLANES:
        plane = block // c1
        place += (block - plane * c1) * s1 + plane * s2
    else:
        place += block * s1
    if PACK:
        tl.store(packed + at, tl.load(strided + place, mask=inside), mask=inside)
    else:
        tl.store(strided + place, tl.load(packed + at, mask=inside), mask=inside)
