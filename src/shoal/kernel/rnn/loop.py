"""A recurrence as a loop in Python: what the fast kernels are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.kernel.rnn.functions import function
from shoal.kernel.rnn.shapes import wide


class _Clip(torch.autograd.Function):
    """The identity, whose gradient is cut to a bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-ctx.bound, ctx.bound), None


def loop(
    name: str, wx: Tensor, R: Tensor, bias: Tensor, states: Tensor, *, clip: float = 0.0
) -> Tensor:
    """All states [S, B, T, N, D], in fp32 or wider.

    Args:
        name: of the function.
        wx: [B, T, inputs, N, D].
        R: [products, N, D, D].
        bias: [gates, N, D].
        states: before the first step [S, B, 1, N, D].
        clip: bound of what the product sends back to a state; 0: none.
    """
    what, dtype = function(name), wide(wx.dtype)
    wx, bias, now_SBND = wx.to(dtype), bias.to(dtype), states.to(dtype)[:, :, 0]
    gates, heads, units, _ = R.shape
    # [N, D inputs, products x D outputs]
    matrix_NDE = R.to(dtype).permute(1, 3, 0, 2).reshape(heads, units, gates * units)
    results = []
    # Views made together: the gradient of a view by itself is a tensor of all steps, each time.
    for wx_BGND in wx.unbind(1):
        h_NBD = now_SBND[0].transpose(0, 1)
        if clip:
            h_NBD = _Clip.apply(h_NBD, clip)  # type: ignore[no-untyped-call]
        product = torch.bmm(h_NBD, matrix_NDE).view(heads, -1, gates, units)
        now_SBND = what.step(wx_BGND, product.permute(1, 2, 0, 3), bias, now_SBND)
        results.append(now_SBND)
    return torch.stack(results, 2)
