"""No cache: every iteration computes the whole request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.serve.decode.diffusion.protocols import Window


@part
class NoCache:
    """Exact, and as dear as the request is long."""

    def window(self, block: Window, length: int, step: int) -> Window:
        return 0, length
