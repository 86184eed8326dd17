"""The update of LAMB, as an optimizer of torch's form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from shoal.kernel.tensors import local
from shoal.train.optimizers.eager import EagerOptimizer


class LambStep(EagerOptimizer):
    """See :class:`~shoal.train.optimizers.lamb.Lamb`.

    Args:
        groups: parameters with their ``weight_decay``.
        lr: learning rate.
        betas: decay of both moments.
        eps: constant added to the root of the second moment.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            first_decay, second_decay = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, gradient = local(parameter), local(parameter.grad)
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                count = int(state["step"])
                first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
                first.lerp_(gradient, 1 - first_decay)
                second.mul_(second_decay).addcmul_(gradient, gradient, value=1 - second_decay)
                root = (second / (1 - second_decay**count)).sqrt_().add_(group["eps"])
                update = (first / (1 - first_decay**count)).div_(root)
                if group["weight_decay"]:
                    update.add_(weight, alpha=group["weight_decay"])
                size, move = float(weight.norm()), float(update.norm())
                # A tensor that is all zero, or does not move, has no ratio.
                ratio = size / move if size > 0 and move > 0 else 1.0
                if not math.isfinite(ratio):
                    ratio = 1.0
                weight.add_(update, alpha=-group["lr"] * ratio)
