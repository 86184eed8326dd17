"""Keys and values projected to a few rows, which are all-reduced; see ``context.projected``.

Shapes: r rows of the projections.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.parallel.context.run.block import wide
from shoal.parallel.protocols import Comm


class _SumOfShares(torch.autograd.Function):
    """The sum over all ranks; every rank uses it, so its gradient is a sum as well."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        total = share.clone()
        comm.all_reduce(total, tag="context.projected").wait()
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total, tag="context.projected_grad").wait()
        return total, None


def projected(
    q: Tensor, k: Tensor, v: Tensor, key_map: Tensor, value_map: Tensor, comm: Comm
) -> Tensor:
    """Attention of queries [B, H, n, d] over the projected keys of all ranks."""
    kind = wide(q.dtype)
    shares = torch.stack(
        [key_map.to(kind) @ k.to(kind), value_map.to(kind) @ v.to(kind)]
    )  # [2, B, K, r, d]
    summed: Tensor = _SumOfShares.apply(shares, comm)  # type: ignore[no-untyped-call]
    keys, values = summed.to(q.dtype)
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1])
