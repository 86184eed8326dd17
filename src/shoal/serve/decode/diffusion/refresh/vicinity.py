"""The neighbours of the block are computed with it: they feel its new tokens most.

Source: Ma et al., dInfer, 2025, section 4.3 (vicinity KV-cache refresh).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.serve.decode.diffusion.protocols import Window


@part
class VicinityRefresh:
    """Recompute the block, ``a`` tokens before it and ``b`` tokens after it in each iteration.

    The whole sequence is recomputed when the block begins and in the iterations given by ``warmup``
    and ``every``.

    Args:
        a: tokens before the block.
        b: tokens and masks after it.
        warmup: first iterations of a block that recompute the whole sequence.
        every: iterations between two recomputations of the whole sequence; 0 for none after
            ``warmup``.
    """

    a: Annotated[int, Ge(0)] = 16
    b: Annotated[int, Ge(0)] = 16
    warmup: Annotated[int, Ge(1)] = 1
    every: Annotated[int, Ge(0)] = 0

    def window(self, block: Window, length: int, step: int) -> Window:
        if step < self.warmup or (self.every and step % self.every == 0):
            return 0, length
        return max(0, block[0] - self.a), min(length, block[1] + self.b)
