"""Training's operators by those of PyTorch, in as few passes over memory as they allow.

The composed operators convert every activation to fp32 and back, several times. Here the
activations stay as they are, with statistics in fp32. Under ``torch.compile`` they are written
plainly, for the compiler to fuse.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernel.protocols import Ready


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of the last dimension, in fp32 or better."""
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    scale: Tensor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return scale


class _RmsNorm(torch.autograd.Function):
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
    @once_differentiable
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


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or torch.is_inference_mode_enabled()  # of few tokens the calls cost more than the work
    ):
        return F.rms_norm(x, (x.shape[-1],), weight_D.to(x.dtype), eps)
    if not torch.is_grad_enabled():  # the same numbers without autograd's part of the call
        return (x * _scale(x, eps).to(x.dtype)).mul_(weight_D.to(x.dtype))
    out: Tensor = _RmsNorm.apply(x, weight_D, eps)  # type: ignore[no-untyped-call]
    return out


def rotate(x_BTNd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair (first half, second half) of each head by its angle."""
    first, second = x_BTNd.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _rotate_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float) -> None:
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)


class _RotateSplit(torch.autograd.Function):
    """Rotation of queries and keys and the split into three, in one buffer each way.

    Autograd's own split, rotation and concatenation pass over the memory twice as often.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_BTNd: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        turned = num_heads + num_kv_heads
        out = torch.empty_like(qkv_BTNd[:, :, :turned])
        _rotate_into(qkv_BTNd[:, :, :turned], cos, sin, out, 1.0)
        ctx.save_for_backward(cos, sin)
        ctx.heads = (num_heads, num_kv_heads)
        # The values are a view: marked so, autograd would refuse, so an alias is used.
        return (
            out[:, :, :num_heads],
            out[:, :, num_heads:],
            qkv_BTNd[:, :, turned:].clone(),
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        num_heads, num_kv_heads = ctx.heads
        turned = num_heads + num_kv_heads
        batch, length, _, dim = grad_q.shape
        grad = grad_q.new_empty(batch, length, turned + num_kv_heads, dim)
        _rotate_into(grad_q, cos, sin, grad[:, :, :num_heads], -1.0)
        _rotate_into(grad_k, cos, sin, grad[:, :, num_heads:turned], -1.0)
        grad[:, :, turned:] = grad_v
        return grad, None, None, None, None


def rotate_split(
    qkv_BTNd: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the fused projection and rotate queries and keys.

    Args:
        qkv_BTNd: [B, T, H + 2K, head_dim], queries first, values last.
        cos: [T, 1, C].
        sin: [T, 1, C].
        num_heads: H.
        num_kv_heads: K.

    Returns:
        q [B, T, H, head_dim], k and v [B, T, K, head_dim].
    """
    if torch.compiler.is_compiling():
        q, k, v = torch.split(qkv_BTNd, [num_heads, num_kv_heads, num_kv_heads], 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v
    if not torch.is_grad_enabled():  # the same numbers without autograd's part of the call
        turned = num_heads + num_kv_heads
        out = torch.empty_like(qkv_BTNd[:, :, :turned])
        _rotate_into(qkv_BTNd[:, :, :turned], cos, sin, out, 1.0)
        return out[:, :, :num_heads], out[:, :, num_heads:], qkv_BTNd[:, :, turned:]
    q, k, v = _RotateSplit.apply(  # type: ignore[no-untyped-call]
        qkv_BTNd, cos, sin, num_heads, num_kv_heads
    )
    return q, k, v


def gate(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of both halves of the last dimension."""
    first, up = gate_up.chunk(2, -1)
    return F.silu(first) * up


def rms_norm(eps: float) -> Ready:
    """The norm; see :mod:`shoal.kernel.fused.trains`."""
    return functools.partial(norm, eps=eps)


def swiglu() -> Ready:
    """The activation."""
    return gate


def rope(heads: int, kv_heads: int, eps: float) -> Ready:
    """The rotation, with norms before it by themselves."""

    def run(
        qkv: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        q_norm_d: Tensor | None = None,
        k_norm_d: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (table.to(qkv.dtype).unsqueeze(1) for table in (cos_TC, sin_TC))
        if q_norm_d is None or k_norm_d is None:
            return rotate_split(qkv, cos, sin, heads, kv_heads)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 2)
        q, k = norm(q, q_norm_d, eps), norm(k, k_norm_d, eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    return run
