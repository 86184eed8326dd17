"""Causal attention of training in bf16 by AVX-512 or matrix tiles, both ways."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.kernel.fused.cpp_training import runs_here
from shoal.kernel.native import function
from shoal.kernel.native.tiles import has_tiles


def takes(q: Tensor, k: Tensor) -> bool:
    """Whether :func:`causal` computes these, and keeps all threads busy.

    Args:
        q: [B, H, T, d].
        k: [B, K, T, d].
    """
    return (
        q.dtype == k.dtype == torch.bfloat16
        and q.shape[2] == k.shape[2]
        and q.shape[3] % 32 == 0
        and k.shape[0] * k.shape[1] >= torch.get_num_threads()
        and runs_here()
    )


def _native(way: str, arguments: str) -> Callable[..., Any]:
    """The function of a way, ``forward`` or ``backward``, for this processor."""
    name = "causal_amx" if has_tiles() else "causal"
    return function(name, f"{name}_{way}", arguments)


def _strides(*tensors: Tensor) -> Any:
    every = array("q")
    for tensor in tensors:
        batch, head, row, _ = tensor.stride()
        every.extend((batch, row, head))
    return every


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# An operator of PyTorch's, so that what keeps the results of operators can keep this one's.
torch.library.define(
    "shoal::causal_attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
)


@torch.library.impl("shoal::causal_attention", "CPU")
def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = q.shape
    # In the layout [B, T, heads, d] that the projections have.
    out = q.new_empty(batch, length, heads, dim).transpose(1, 2)
    logs = q.new_empty(batch, heads, length, dtype=torch.float32)
    _native("forward", "pppppalllll")(
        *(x.data_ptr() for x in (q, k, v, out, logs)), _strides(q, k, v, out),
        batch, heads, k.shape[1], length, dim,
    )  # fmt: skip
    return out, logs


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _dense(q), _dense(k), _dense(v)
        out: Tensor
        out, logs = torch.ops.shoal.causal_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, logs)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, logs = ctx.saved_tensors
        grad = _dense(grad.to(q.dtype))
        batch, heads, length, dim = q.shape
        grads = [x.new_empty(batch, length, x.shape[1], dim).transpose(1, 2) for x in (q, k, v)]
        _native("backward", "ppppppppp" + "alllll")(
            *(x.data_ptr() for x in (q, k, v, out, grad, logs, *grads)),
            _strides(q, k, v, out, grad), batch, heads, k.shape[1], length, dim,
        )  # fmt: skip
        return grads[0], grads[1], grads[2]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What queries see of the keys up to their own place, with a gradient.

    Weights are bf16 in products and their sums fp32, as in PyTorch's kernel; the same bits for any
    number of threads.

    Args:
        q: [B, H, T, d] in bf16, d a multiple of 32.
        k: [B, K, T, d], K a divisor of H.
        v: [B, K, T, d].

    Returns:
        [B, H, T, d].

    Source: Dao et al., FlashAttention, 2022, for the pass back from sums of each row.
    """
    out: Tensor = _Causal.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out
