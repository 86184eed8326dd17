"""What methods share that work on whole branches of a block: attention and feed-forward."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from shoal.train.peft.base import matches

if TYPE_CHECKING:
    from torch import nn

    from shoal.ir import ModelShape
    from shoal.train.peft.run.branches import BlockBranch
    from shoal.train.peft.run.handle import ModelPeftHandle

BRANCHES = "*.self_attn|*.mlp"


class BranchMethod:
    """Base of the methods that put a module on or beside a branch.

    Args:
        targets: branches that get one: patterns of names joined by a bar.
    """

    name: ClassVar[str]
    mergeable: ClassVar[bool] = False

    # Fields of the parts, which are dataclasses.
    targets: str

    @abstractmethod
    def count(self, width: int) -> float:
        """Parameters that are trained for one branch of a stream of this width."""

    def extra(self) -> float:
        """Parameters that all branches share."""
        return 0.0

    def prepare(self, handle: ModelPeftHandle, seed: int) -> None:
        """What is done once, before the branches are filled."""

    @abstractmethod
    def module(self, handle: ModelPeftHandle, branch: BlockBranch, seed: int) -> nn.Module:
        """What one branch gets."""

    def parameters(self, shape: ModelShape) -> float:
        names = [
            f"model.layers.{layer}.{leaf}"
            for layer in range(shape.num_layers)
            for leaf in ("self_attn", "mlp")
        ]
        chosen = sum(matches(name, self.targets) for name in names)
        return chosen * self.count(shape.hidden) + self.extra()

    def put_into(self, handle: ModelPeftHandle, targets: str, seed: int) -> None:
        """Put the modules into the model of a handle."""
        from shoal.train.peft.run.branches import find_branches, hook

        branches = find_branches(handle.model, targets, f"finetune.{self.name}.targets")
        self.prepare(handle, seed)
        for branch in branches:
            hook(handle, branch, self.module(handle, branch, seed))

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        from shoal.train.peft.run.handle import ModelPeftHandle

        chosen = targets or self.targets
        handle = ModelPeftHandle(model, self.name, self, chosen, mergeable=self.mergeable)
        with handle.building():
            self.put_into(handle, chosen, seed)
        return handle
