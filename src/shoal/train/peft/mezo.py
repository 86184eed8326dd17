"""MeZO: fine-tuning by forward passes alone.

Source: Malladi et al., Fine-Tuning Language Models with Just Forward Passes, 2023, algorithm 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import nn

    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class MeZO:
    """Zeroth-order SGD: two losses along a random direction give the step; no backward pass.

    It trains all weights in the memory of a forward pass, without gradients or optimizer state. One
    number is stored per step, from which the weights are reproduced bit for bit. It replaces the
    optimizer and keeps its learning rate and schedule; it needs a learning rate thousands of times
    lower than Adam's, and many steps.

    Args:
        eps: size of the perturbation of the weights.
        keep_base: keep a copy of the base, so that the method can be removed.
        targets: parameters that are trained: patterns of the model's own names joined by a bar.
    """

    eps: Annotated[float, Gt(0)] = 1e-3
    keep_base: bool = False
    targets: str = "*"
    traits: ClassVar[frozenset[str]] = frozenset(
        {"replaces_base", "sees_no_documents", "updates_in_passes"}
    )
    name: ClassVar[str] = "mezo"
    advice: ClassVar[str] = "no gradients at all, and thousands of steps"
    kept: ClassVar[float] = 0.0
    mergeable: ClassVar[bool] = True
    forward_only: ClassVar[bool] = True

    def parameters(self, shape: ModelShape) -> float:
        from shoal.cost.arithmetic import parameters

        return float(parameters(shape))

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        from shoal.train.peft.run.mezo import ZerothOrder

        return ZerothOrder(model, self, targets or self.targets, seed)
