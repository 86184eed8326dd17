"""Causal attention without a softmax, SiLU(q k + bias) / n, by AVX-512 and by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernel.fused.cpp_training import runs_here
from shoal.kernel.native import function

TIMES = 129
"""Buckets of time."""


def pointwise_reference(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, share: float,
    buckets: Tensor | None = None, time: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`pointwise`: by operators of torch."""
    length = q.shape[1]
    at = torch.arange(length)
    apart = at[:, None] - at
    bias = position[apart.clamp(min=0)]
    if buckets is not None and time is not None:
        bias = bias + time[buckets.long()].unsqueeze(1)
    products = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) + bias
    weights = F.silu(products) * ((apart >= 0) * share)
    return (weights @ v.transpose(1, 2)).transpose(1, 2)


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, position, share, buckets, time = given
        batch, length, heads, dim = q.shape
        out: Tensor = q.new_empty(batch, length, heads, dim)
        _native("forward", "ppp" + "lllllf" + "ppplp")(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), batch, heads, length, dim, q.stride(1),
            share, position.data_ptr(), *_times(buckets, time), torch.get_num_threads(),
            out.data_ptr(),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, position, buckets, time)
        ctx.share = share
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, position, buckets, time = ctx.saved_tensors
        batch, length, heads, dim = q.shape
        grad = grad.contiguous()
        grads = [q.new_empty(batch, length, heads, dim) for _ in range(3)]
        places = q.new_empty(batch * heads, length)
        times = q.new_zeros(batch * heads, TIMES)
        _native("backward", "pppp" + "lllllf" + "pppl" + "ppppp")(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), grad.data_ptr(), batch, heads, length, dim,
            q.stride(1), ctx.share, position.data_ptr(), *_times(buckets, time),
            torch.get_num_threads(), *(one.data_ptr() for one in (*grads, places, times)),
        )  # fmt: skip
        dposition = torch.zeros_like(position)
        dposition[:length] = places.sum(0)
        return *grads, dposition, None, None, None if time is None else times.sum(0)


def _native(way: str, arguments: str) -> Callable[..., Any]:
    return function("pointwise", f"pointwise_{way}", arguments)


def _times(buckets: Tensor | None, time: Tensor | None) -> tuple[int | None, int | None]:
    if buckets is None or time is None:
        return None, None
    return buckets.data_ptr(), time.data_ptr()


def pointwise(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, share: float,
    buckets: Tensor | None = None, time: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What queries take from the keys up to their own place, with a gradient.

    The same bits for any number of threads.

    Args:
        q: [B, N, H, d] in fp32.
        k: the same.
        v: the same.
        position: [N or more], added to a product by how far the key lies behind the query.
        share: by which weights are multiplied.
        buckets: uint8 [B, N, N], of the time between a query and a key, below 129.
        time: [129], added by bucket.

    Returns:
        [B, N, H, d].

    Source: Zhai et al., Actions Speak Louder than Words, 2024, equation 2.
    """
    if q.dtype != torch.float32 or not runs_here():
        return pointwise_reference(q, k, v, position, share, buckets, time)
    if not all(_dense(one, q.stride()) for one in (q, k, v)):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if buckets is not None:
        buckets = buckets.contiguous()
    out: Tensor = _Pointwise.apply(q, k, v, position, share, buckets, time)  # type: ignore[no-untyped-call]
    return out


def _dense(one: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a sequence and its heads lie as the kernel reads them."""
    _, length, heads, dim = one.shape
    wanted = (length * strides[1], strides[1], dim, 1)
    return one.stride() == wanted and strides[1] >= heads * dim
