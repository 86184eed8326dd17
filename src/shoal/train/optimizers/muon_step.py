"""The update of Muon where a CPU has no products of bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.core.native import cpu_flags
from shoal.kernel.tensors import local
from shoal.train.optimizers.eager import EagerOptimizer


class MuonStep(EagerOptimizer, torch.optim.Muon):
    """PyTorch's Muon, whose products on such a CPU are taken in fp32 and rounded to bf16.

    PyTorch's own are up to 25 times slower there. The values are the same but for the order of
    sums, so a run may go on on another machine.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, gradient = local(parameter), local(parameter.grad)
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                moment = local(state["momentum_buffer"])
                moment.lerp_(gradient, 1 - group["momentum"])
                update = _orthogonal(gradient.lerp(moment, group["momentum"]), group)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * (0.2 * max(weight.shape) ** 0.5))


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """The matrix with singular values near 1, by Newton-Schulz iterations rounded to bf16."""
    a, b, c = group["ns_coefficients"]
    slow = matrix.device.type == "cpu" and not cpu_flags() & {"avx512_bf16", "amx_bf16"}
    wide = torch.float32 if slow else torch.bfloat16
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.bfloat16()
    result = result.T if tall else result
    result.div_(result.norm().clamp(min=group["eps"]))
    for _ in range(group["ns_steps"]):
        x = result.to(wide)
        gram = (x @ x.T).bfloat16().to(wide)
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(wide)
        result = torch.addmm(x, gram, x, beta=a).bfloat16()
    return result.T if tall else result
