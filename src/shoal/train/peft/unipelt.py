"""UniPELT: LoRA, prefix and adapters at once, each behind a gate.

Source: Mao et al., UniPELT: A Unified Framework for Parameter-Efficient Language Model Tuning,
2021, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.train.peft.adapter import Adapter
from shoal.train.peft.base import ATTENTION
from shoal.train.peft.lora import Lora
from shoal.train.peft.prefix import PrefixTuning
from shoal.train.peft.prompts import PromptMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class UniPelt(PromptMethod):
    """LoRA, adapters and prefix together, each with a trained gate.

    Differs: gates of LoRA and adapters are computed for each token, because a mean over a sequence
    would depend on later tokens; the gate of the prefix is one number per layer.

    Args:
        r: rank of LoRA.
        alpha: LoRA's change is multiplied by alpha / r.
        tokens: length of the prefix.
        bottleneck: width of the adapters, which follow the feed-forward layers.
        targets: linear layers that LoRA changes: patterns of names joined by a bar.
    """

    r: int = 4
    alpha: float = 8.0
    tokens: int = 8
    bottleneck: int = 16
    targets: str = ATTENTION
    name: ClassVar[str] = "unipelt"

    def __post_init__(self) -> None:
        self._pieces()

    def _pieces(self) -> tuple[Lora, PrefixTuning, Adapter]:
        return (
            Lora(r=self.r, alpha=self.alpha, targets=self.targets),
            PrefixTuning(tokens=self.tokens),
            Adapter(bottleneck=self.bottleneck, targets="*.mlp"),
        )

    def parameters(self, shape: ModelShape) -> float:
        from shoal.train.peft.base import matches, shape_sites

        gates = sum(
            columns + 1 for name, _, columns in shape_sites(shape) if matches(name, self.targets)
        )
        gates += shape.num_layers * (shape.hidden + 1) + shape.num_layers
        return gates + sum(piece.parameters(shape) for piece in self._pieces())

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        from shoal.train.peft.run.branches import find_branches, hook
        from shoal.train.peft.run.gated import GatedBottleneck, GatedLowRank, gate_prefix
        from shoal.train.peft.run.sites import find_sites

        lora, prefix, adapter = self._pieces()
        prefix.put_into(handle, seed)
        gate_prefix(handle)
        for site in find_sites(handle.model, self.targets, "finetune.unipelt.targets"):
            handle.put(site, GatedLowRank(site, lora.r, lora.scale, seed=seed))
        for branch in find_branches(handle.model, adapter.targets, "finetune.unipelt"):
            hook(handle, branch, GatedBottleneck(branch, adapter.bottleneck, seed=seed))
