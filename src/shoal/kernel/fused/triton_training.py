"""Training's passes on a GPU, in Triton: sums over rows in blocks of the same rows, always."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shoal.kernel.fused import autograd
from shoal.kernel.fused.protocols import OperatorPasses
from shoal.kernel.fused.triton import power
from shoal.kernel.protocols import Ready

# Rows of a program that sums a weight's gradient.
_ROWS = 32


def _blocks(rows: int) -> int:
    return -(-rows // _ROWS)


def rms_norm(eps: float) -> Ready:
    """The norm: a row in registers."""
    from shoal.kernel.fused.triton_code import rms_norm as forward_row
    from shoal.kernel.fused.triton_training_code import rms_norm_grad

    def forward(x: Tensor, weight_N: Tensor) -> Tensor:
        x, weight, width = x.contiguous(), weight_N.detach().contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        forward_row[(x.numel() // width,)](x, x, weight, out, width, eps, False, power(width))
        return out

    def backward(grad: Tensor, x: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        grad, x, weight = grad.contiguous(), x.contiguous(), weight_N.detach().contiguous()
        width = x.shape[-1]
        rows, out = x.numel() // width, torch.empty_like(x)
        partial = x.new_empty(_blocks(rows), width, dtype=torch.float32)
        rms_norm_grad[(_blocks(rows),)](
            grad, x, weight, out, partial, rows, width, eps, _ROWS, power(width)
        )
        return out, partial.sum(0)

    return functools.partial(autograd.rms_norm, OperatorPasses(forward, backward))


def swiglu() -> Ready:
    """The activation, a piece of a row a program."""
    from shoal.kernel.fused.triton_code import swiglu as forward_piece
    from shoal.kernel.fused.triton_training_code import swiglu_grad

    def forward(x: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        block = min(1024, power(width))
        forward_piece[(out.numel() // width, -(-width // block))](x.contiguous(), out, width, block)
        return out

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        x, width = x.contiguous(), x.shape[-1] // 2
        out, block = torch.empty_like(x), min(1024, power(width))
        grid = (grad.numel() // width, -(-width // block))
        swiglu_grad[grid](grad.contiguous(), x, out, width, block)
        return out

    return functools.partial(autograd.swiglu, OperatorPasses(forward, backward))


def rope(heads: int, kv_heads: int, eps: float) -> Ready:
    """Norm and rotation, a head a program."""
    from shoal.kernel.fused.triton_code import rope as turn
    from shoal.kernel.fused.triton_training_code import rope_grad

    turned = heads + kv_heads

    def forward(
        qkv: Tensor, cos: Tensor, sin: Tensor, q_norm_d: Tensor | None, k_norm_d: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, every, dim = qkv.shape
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        out = qkv.clone(memory_format=torch.contiguous_format)
        place = torch.arange(length, device=qkv.device).repeat(batch)
        turn[(batch * length, turned)](
            out, cos, sin, place, cos if q_norm_d is None else q_norm_d.detach(),
            cos if k_norm_d is None else k_norm_d.detach(), every, heads, dim // 2, eps,
            q_norm_d is not None, k_norm_d is not None, power(dim // 2),
        )  # fmt: skip
        return out[:, :, :heads], out[:, :, heads:turned], out[:, :, turned:]

    def backward(
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        qkv: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        q_norm_d: Tensor | None,
        k_norm_d: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        out = torch.cat([grad_q, grad_k, grad_v], 2)
        batch, length, every, dim = out.shape
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        rows = batch * length
        norms = q_norm_d is not None and k_norm_d is not None
        x = out if qkv is None else qkv.contiguous()
        partial = cos.new_empty(_blocks(rows), turned, dim) if norms else cos
        rope_grad[(_blocks(rows), turned)](
            out, x, cos, sin, cos if q_norm_d is None else q_norm_d.detach(),
            cos if k_norm_d is None else k_norm_d.detach(), partial, rows, length, every, heads,
            turned, dim // 2, eps, norms, _ROWS, power(dim // 2),
        )  # fmt: skip
        if not norms:
            return out, None, None
        return out, partial[:, :heads].sum((0, 1)), partial[:, heads:].sum((0, 1))

    return functools.partial(autograd.rope, OperatorPasses(forward, backward))
