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
    """``a`` tokens before the block and ``b`` behind it are computed again in each iteration.

    Everything is, when the block begins and in the iterations that ``warmup`` and ``every`` say.

    Args:
        a: tokens before the block.
        b: tokens and masks behind it.
        warmup: iterations of a block, counted with the first, that compute everything.
        every: compute everything in each so-manyth iteration; 0 for never again.
    """

    a: Annotated[int, Ge(0)] = 16
    b: Annotated[int, Ge(0)] = 16
    warmup: Annotated[int, Ge(1)] = 1
    every: Annotated[int, Ge(0)] = 0

    def window(self, block: Window, length: int, step: int) -> Window:
        if step < self.warmup or (self.every and step % self.every == 0):
            return 0, length
        return max(0, block[0] - self.a), min(length, block[1] + self.b)
