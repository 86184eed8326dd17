"""A chat of workers: a step is seen by the others when it is finished.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.serve.decode.hogwild.protocols import BlockSpace

if TYPE_CHECKING:
    from shoal.serve.decode.hogwild.blocks import HogwildBlock


@part
class InterleavedLayout:
    """The prompt, the finished steps of all workers, and the worker's own unfinished step."""

    moves: ClassVar[bool] = True
    headers: ClassVar[tuple[str, ...]] = ()

    def blocks(self, space: BlockSpace, worker: str) -> list[HogwildBlock]:
        return [space.prompt, *space.history, space.own[worker]]
