"""A cache of what is before the block.

Source: Wu et al., Fast-dLLM, 2025, section 3.2 (prefix cache).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.serve.decode.diffusion.protocols import Window


@part
class PrefixRefresh:
    """Recompute the block and all after it; cache everything before it when the block begins."""

    def window(self, block: Window, length: int, step: int) -> Window:
        return (0, length) if step == 0 else (block[0], length)
