"""Whole texts one behind the other.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.serve.decode.hogwild.protocols import BlockSpace

if TYPE_CHECKING:
    from shoal.serve.decode.hogwild.blocks import HogwildBlock


@part
class ContiguousLayout:
    """The prompt, all tokens of the other workers, and the worker's own tokens."""

    moves: ClassVar[bool] = False
    headers: ClassVar[tuple[str, ...]] = ()

    def blocks(self, space: BlockSpace, worker: str) -> list[HogwildBlock]:
        return [space.prompt, *space.others(worker), space.own[worker]]
