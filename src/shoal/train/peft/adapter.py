"""Adapters: small bottlenecks after attention and feed-forward.

Source: Houlsby et al., Parameter-Efficient Transfer Learning for NLP, 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.train.peft.branches import BRANCHES, BranchMethod

if TYPE_CHECKING:
    from torch import nn

    from shoal.train.peft.run.branches import BlockBranch
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class Adapter(BranchMethod):
    """y + up(gelu(down(y))) on the output y of a branch, before the residual addition.

    Args:
        bottleneck: width of the bottleneck.
        targets: branches that get one: patterns of names joined by a bar.
    """

    bottleneck: Annotated[int, Ge(1)] = 16
    targets: str = BRANCHES
    name: ClassVar[str] = "adapter"

    def count(self, width: int) -> float:
        return 2 * width * self.bottleneck + width + self.bottleneck

    def module(self, handle: ModelPeftHandle, branch: BlockBranch, seed: int) -> nn.Module:
        from shoal.train.peft.run.branches import Bottleneck

        return Bottleneck(branch, self.bottleneck, seed=seed)
