"""MAM: a prefix in attention, and a wide adapter beside the feed-forward.

Source: He et al., Towards a Unified View of Parameter-Efficient Transfer Learning, 2021,
section 4.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.parallel_adapter import ParallelAdapter
from shoal.train.peft.prefix import PrefixTuning
from shoal.train.peft.prompts import PromptMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class Mam(PromptMethod):
    """Prefix tuning and parallel adapters together; the initial prefix changes the output.

    Args:
        tokens: length of the prefix.
        bottleneck: width of the adapters.
        scale: factor of the adapters' output.
    """

    tokens: int = 8
    bottleneck: int = 32
    scale: float = 4.0
    name: ClassVar[str] = "mam"

    def __post_init__(self) -> None:
        self._pieces()

    def _pieces(self) -> tuple[PrefixTuning, ParallelAdapter]:
        beside = ParallelAdapter(bottleneck=self.bottleneck, scale=self.scale)
        return PrefixTuning(tokens=self.tokens), beside

    def parameters(self, shape: ModelShape) -> float:
        return sum(piece.parameters(shape) for piece in self._pieces())

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        prefix, beside = self._pieces()
        prefix.put_into(handle, seed)
        beside.put_into(handle, beside.targets, seed)
