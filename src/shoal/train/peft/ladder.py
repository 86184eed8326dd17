"""Ladder side tuning: a small network beside the base, which is never back-propagated through.

Source: Sung et al., LST: Ladder Side-Tuning for Parameter and Memory Efficient Transfer Learning,
2022, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.train.peft.prompts import PromptMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class Ladder(PromptMethod):
    """A side network on the blocks' outputs; the base saves no activations.

    Differs: blocks of the side network have no attention; only the base mixes tokens.

    Args:
        width: width of the side network.
    """

    width: Annotated[int, Ge(1)] = 32
    traits: ClassVar[frozenset[str]] = frozenset({"own_blocks"})
    name: ClassVar[str] = "ladder"
    kept: ClassVar[float] = 0.1

    def parameters(self, shape: ModelShape) -> float:
        """A rung and a block of the side stream for each block, and the way back."""
        own = 2 * self.width * 4 * self.width + 5 * self.width
        rung = shape.hidden * self.width + 1
        return shape.num_layers * (own + rung) + 2 * shape.hidden * self.width

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        from shoal.train.peft.run.ladder import beside

        beside(handle, self.width, seed)
