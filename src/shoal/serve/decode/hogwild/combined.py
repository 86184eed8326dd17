"""Finished steps in common, and the steps under way of all.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.serve.decode.hogwild.protocols import BlockSpace

if TYPE_CHECKING:
    from shoal.serve.decode.hogwild.blocks import HogwildBlock


@part
class CombinedLayout:
    """The prompt, all finished steps, the other workers' unfinished steps, and the worker's own."""

    moves: ClassVar[bool] = True
    headers: ClassVar[tuple[str, ...]] = ("history", "others", "own")

    def blocks(self, space: BlockSpace, worker: str) -> list[HogwildBlock]:
        others = space.others(worker)
        before_others = [space.headers["others"]] if others and "others" in space.headers else []
        before_own = [space.headers["own"]] if "own" in space.headers else []
        return [
            space.prompt,
            *space.history,
            *before_others,
            *others,
            *before_own,
            space.own[worker],
        ]
