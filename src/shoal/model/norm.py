"""Root-mean-square normalisation.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.protocols import Ready

__all__ = ["RMSNorm", "rms_norm"]


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of the last dimension, in fp32 or better."""
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    scale: Tensor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return scale


class _RMSNorm(torch.autograd.Function):
    """RMS norm in the dtype of its input, with statistics in fp32.

    The composed operators convert every activation to fp32 and back, several times.
    Here the activations stay as they are. The backward pass is layer norm's fused one
    with a mean of zero, plus the row sum that it wrongly subtracts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        ctx.save_for_backward(x, weight_D, scale)
        out: Tensor = (x * scale.to(x.dtype)).mul_(weight_D.to(x.dtype))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, scale = ctx.saved_tensors
        dim = x.shape[-1]
        grad = grad.contiguous()
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            x.contiguous(),
            [dim],
            torch.zeros_like(scale),
            scale,
            weight_D.to(scale.dtype),
            None,
            [True, True, False],
        )
        sums = (grad.view(-1, dim) @ weight_D.to(grad.dtype)).view(scale.shape)
        missing = sums.to(scale.dtype).mul_(scale).div_(dim)
        return grad_x.add_(missing.to(grad_x.dtype)), grad_weight.to(weight_D.dtype), None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or torch.is_inference_mode_enabled()  # of few tokens the calls cost more than the work
    ):
        return F.rms_norm(x, (x.shape[-1],), weight_D.to(x.dtype), eps)
    if not torch.is_grad_enabled():  # the same numbers without autograd's part of the call
        return (x * _scale(x, eps).to(x.dtype)).mul_(weight_D.to(x.dtype))
    out: Tensor = _RMSNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return out


class RMSNorm(nn.Module):
    """RMS norm with a weight per dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernel: Ready | None = None  # of inference: see shoal.model.accelerate

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.kernel is not None:
            fast: Tensor = self.kernel(x)
            return fast
        return rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + branch`` and that normalised; x may change."""
        if branch is None:
            return x, self(x)
        if self.kernel is not None:
            return x, self.kernel(x, branch)
        x = x + branch
        return x, self(x)
