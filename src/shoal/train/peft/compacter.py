"""Compacter: adapters whose matrices are sums of Kronecker products with low-rank factors.

Source: Karimi Mahabadi et al., Compacter: Efficient Low-Rank Hypercomplex Adapter Layers, 2021,
equation 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.errors import ConfigError, require
from shoal.core.parts import part
from shoal.train.peft.branches import BRANCHES, BranchMethod

if TYPE_CHECKING:
    from torch import nn

    from shoal.train.peft.run.branches import BlockBranch
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class Compacter(BranchMethod):
    """An adapter whose matrices are sum_i A_i kron (s_i t_i), the n small A_i shared by all layers.

    Args:
        bottleneck: width of the bottleneck.
        n: products in a sum, and the size of the A_i; divides width and bottleneck.
        rank: rank of s_i t_i.
        targets: branches that get one: patterns of names joined by a bar.
    """

    bottleneck: Annotated[int, Ge(1)] = 32
    n: Annotated[int, Ge(1)] = 4
    rank: Annotated[int, Ge(1)] = 1
    targets: str = BRANCHES
    name: ClassVar[str] = "compacter"

    def __post_init__(self) -> None:
        require(
            self.bottleneck % self.n == 0,
            "finetune.compacter.bottleneck",
            self.bottleneck,
            expected=f"a multiple of n = {self.n}",
        )

    def count(self, width: int) -> float:
        """Low-rank factors and biases; the shared A_i are counted once, with the whole."""
        return 2 * self.rank * (width + self.bottleneck) + width + self.bottleneck

    def extra(self) -> float:
        return 2 * self.n**3

    def prepare(self, handle: ModelPeftHandle, seed: int) -> None:
        from shoal.train.peft.run.branches import SharedFactors

        handle.attach("", "compacter_rules", SharedFactors(self.n, seed), "compacter_rules")

    def module(self, handle: ModelPeftHandle, branch: BlockBranch, seed: int) -> nn.Module:
        """A bottleneck of composed matrices.

        Raises:
            ConfigError: n does not divide the width.
        """
        from shoal.train.peft.run.branches import ComposedBottleneck, SharedFactors

        rules = handle.modules["compacter_rules"]
        assert isinstance(rules, SharedFactors)
        if branch.width % self.n:
            raise ConfigError(
                f"finetune.compacter.n = {self.n}: {branch.name} is {branch.width} wide; give a "
                "divisor of it"
            )
        return ComposedBottleneck(branch, self.bottleneck, rules, self.rank, seed=seed)
