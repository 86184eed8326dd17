"""AdapterDrop: adapters that the lower blocks can do without.

Source: Rücklé et al., AdapterDrop: On the Efficiency of Adapters in Transformers, 2020, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.peft.adapter import Adapter

if TYPE_CHECKING:
    from torch import nn

    from shoal.train.peft.run.branches import BlockBranch
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class AdapterDrop(Adapter):
    """Each step skips the adapters of the first n blocks, with random n up to ``drop``.

    In inference the adapters of the first ``drop`` blocks are skipped.

    Args:
        drop: blocks without an adapter.
    """

    drop: Annotated[int, Ge(0)] = 2
    name: ClassVar[str] = "adapter_drop"

    def prepare(self, handle: ModelPeftHandle, seed: int) -> None:
        """Some blocks must have an adapter in every step.

        Raises:
            ConfigError: ``drop`` is all of them.
        """
        from shoal.train.peft.run.branches import num_blocks

        blocks = num_blocks(handle.model)
        require(
            self.drop < blocks,
            "finetune.adapter_drop.drop",
            self.drop,
            expected=f"fewer than the {blocks} blocks of the model",
        )

    def module(self, handle: ModelPeftHandle, branch: BlockBranch, seed: int) -> nn.Module:
        from shoal.train.peft.run.branches import DroppedBottleneck

        return DroppedBottleneck(branch, self.bottleneck, drop=self.drop, seed=seed)
