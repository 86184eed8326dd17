"""Parallel adapters: small bottlenecks beside attention or feed-forward.

Source: He et al., Towards a Unified View of Parameter-Efficient Transfer Learning, 2021,
section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from shoal.core.parts import part
from shoal.train.peft.branches import BranchMethod

if TYPE_CHECKING:
    from torch import nn

    from shoal.train.peft.run.branches import BlockBranch
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class ParallelAdapter(BranchMethod):
    """y + scale * up(gelu(down(x))), where x is the input and y the output of the branch.

    Args:
        bottleneck: width of the bottleneck.
        scale: factor of the adapter's output.
        targets: branches that get one: patterns of names joined by a bar.
    """

    bottleneck: Annotated[int, Gt(0)] = 32
    scale: Annotated[float, Gt(0)] = 4.0
    targets: str = "*.mlp"
    name: ClassVar[str] = "parallel_adapter"

    def count(self, width: int) -> float:
        return 2 * width * self.bottleneck + width + self.bottleneck

    def module(self, handle: ModelPeftHandle, branch: BlockBranch, seed: int) -> nn.Module:
        from shoal.train.peft.run.branches import Bottleneck

        return Bottleneck(branch, self.bottleneck, seed=seed, beside=True, scale=self.scale)
