"""Whole texts one behind the other.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.serve.decode.hogwild.protocols import Space

if TYPE_CHECKING:
    from shoal.serve.decode.hogwild.blocks import Block

__all__ = ["Contiguous"]


@part
class Contiguous:
    """The prompt, all that the others have written, and all of one's own."""

    moves: ClassVar[bool] = False
    headers: ClassVar[tuple[str, ...]] = ()

    def blocks(self, space: Space, worker: str) -> list[Block]:
        """See :class:`~shoal.serve.decode.hogwild.protocols.HogwildLayout`."""
        return [space.prompt, *space.others(worker), space.own[worker]]
