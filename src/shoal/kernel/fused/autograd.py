"""The fused operators as functions with a gradient, over the passes of any backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernel.fused.protocols import OperatorPasses


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_N: Tensor, passes: OperatorPasses) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(x, weight_N)
        out: Tensor = passes.forward(x, weight_N)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_N = ctx.saved_tensors
        grad_x, grad_weight = ctx.passes.backward(grad, x, weight_N)
        return grad_x, grad_weight.to(weight_N.dtype), None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passes: OperatorPasses) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(x)
        out: Tensor = passes.forward(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.passes.backward(grad, x), None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_norm_d: Tensor | None,
        k_norm_d: Tensor | None,
        passes: OperatorPasses,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.passes = passes
        # Only the backward pass of the norms looks at what was normalised.
        kept = None if q_norm_d is None and k_norm_d is None else qkv
        ctx.save_for_backward(kept, cos, sin, q_norm_d, k_norm_d)
        q, k, v = passes.forward(qkv, cos, sin, q_norm_d, k_norm_d)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, None, None, Tensor | None, Tensor | None, None]:
        qkv, cos, sin, q_norm_d, k_norm_d = ctx.saved_tensors
        grad, *norms = ctx.passes.backward(
            grad_q, grad_k, grad_v, qkv, cos, sin, q_norm_d, k_norm_d
        )
        grad_q_norm, grad_k_norm = (
            None if found is None or weight is None else found.to(weight.dtype)
            for found, weight in zip(norms, (q_norm_d, k_norm_d), strict=True)
        )
        return grad, None, None, grad_q_norm, grad_k_norm, None


def rms_norm(passes: OperatorPasses, x: Tensor, weight_N: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    out: Tensor = _RmsNorm.apply(x, weight_N, passes)  # type: ignore[no-untyped-call]
    return out


def swiglu(passes: OperatorPasses, x: Tensor) -> Tensor:
    """``silu(gate) * up`` of both halves of the last dimension."""
    out: Tensor = _Swiglu.apply(x, passes)  # type: ignore[no-untyped-call]
    return out


def rope(
    passes: OperatorPasses,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm_d: Tensor | None = None,
    k_norm_d: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, normalised where weights are given and rotated, and values.

    Args:
        passes: of the operator.
        qkv: [B, T, H + 2K, d].
        cos: [T, C]; a function of the place alone, no gradient is made of it.
        sin: [T, C].
        q_norm_d: weight of the norm of queries.
        k_norm_d: weight of the norm of keys.

    Returns:
        q [B, T, H, d], k and v [B, T, K, d].
    """
    q, k, v = _Rope.apply(  # type: ignore[no-untyped-call]
        qkv, cos, sin, q_norm_d, k_norm_d, passes
    )
    return q, k, v
