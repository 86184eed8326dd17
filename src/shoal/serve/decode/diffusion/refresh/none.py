"""No cache: every iteration computes the whole request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.serve.decode.diffusion.protocols import Window


@part
class NoCache:
    """Recompute the whole sequence in every iteration: exact, and slowest for long requests."""

    def window(self, block: Window, length: int, step: int) -> Window:
        return 0, length
