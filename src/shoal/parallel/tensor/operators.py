"""Communication of tensor parallelism as functions with a gradient.

Activations are tokens behind each other, [N, D]. With sequence parallelism a rank holds
n = ceil(N / world) consecutive tokens of them between the split layers, the last ranks with
zero rows where N is not divisible. Every function here comes with its mirror:

==================  =======================  ====================
function            forward                  backward
==================  =======================  ====================
``copy_to``         nothing                  all-reduce
``reduce_from``     all-reduce               nothing
``gather_tokens``   all-gather               reduce-scatter
``reduce_scatter``  reduce-scatter           all-gather
``scatter_tokens``  own rows                 all-gather
``synced``          all-reduce               all-reduce
==================  =======================  ====================

Source: Shoeybi et al., Megatron-LM, 2019 (f and g); Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

# Under this tag the meter counts the activations of tensor parallelism and their gradients.
TAG = "tensor"


def local_tokens(total: int, world: int) -> int:
    """Tokens n of a rank, padding included, where ``world`` ranks share ``total`` tokens."""
    return -(-total // world)


def local_rows(x: Tensor, comm: Comm, fill: float = 0) -> Tensor:
    """This rank's rows [n, ...] of ``x`` [N, ...]; rows beyond the last are ``fill``."""
    rows = local_tokens(len(x), comm.world)
    part = x[comm.rank * rows : (comm.rank + 1) * rows]
    missing = rows - len(part)
    if not missing:
        return part
    return torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)])


def reduced(x: Tensor, comm: Comm) -> Tensor:
    """``x``, which is overwritten, summed over the ranks."""
    comm.all_reduce(x, tag=TAG).wait()
    return x


def gathered(x_nD: Tensor, comm: Comm, total: int) -> Tensor:
    """All tokens [N, D]."""
    out = x_nD.new_empty(comm.world * len(x_nD), *x_nD.shape[1:])
    comm.all_gather(out, x_nD.contiguous(), tag=TAG).wait()
    return out[:total]


def scattered(x_ND: Tensor, comm: Comm) -> Tensor:
    """This rank's rows [n, D] of the sum over the ranks."""
    rows = local_tokens(len(x_ND), comm.world)
    missing = rows * comm.world - len(x_ND)
    whole = F.pad(x_ND, (0, 0, 0, missing)) if missing else x_ND.contiguous()
    out = whole.new_empty(rows, *whole.shape[1:])
    comm.reduce_scatter(out, whole, tag=TAG).wait()
    return out


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A gradient may be shared with another consumer, so its sum gets memory of its own.
        return reduced(grad.clone(memory_format=torch.contiguous_format), ctx.comm), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return reduced(x.clone(memory_format=torch.contiguous_format), comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, comm: Comm, total: int) -> Tensor:
        ctx.comm = comm
        return gathered(x_nD, comm, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        return scattered(grad_ND, ctx.comm), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, comm: Comm) -> Tensor:
        ctx.comm, ctx.total = comm, len(x_ND)
        return scattered(x_ND, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_nD, ctx.comm, ctx.total), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, comm: Comm) -> Tensor:
        ctx.comm, ctx.total = comm, len(x_ND)
        return local_rows(x_ND, comm).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nD: Tensor) -> tuple[Tensor, None]:
        return gathered(grad_nD, ctx.comm, ctx.total), None


class _Synced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, last: bool) -> Tensor:
        ctx.comm, ctx.last = comm, last
        return reduced(x.clone(memory_format=torch.contiguous_format), comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.last:  # all ranks compute the same from it, and so the whole gradient
            return grad, None, None
        return reduced(grad.clone(memory_format=torch.contiguous_format), ctx.comm), None, None


def synced(comm: Comm) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """The :data:`~shoal.model.desync.Join` of ranks that have a stream each."""

    def join(x: Tensor, output: Tensor, last: bool) -> Tensor:
        out: Tensor = _Synced.apply(x / comm.world + output, comm, last)  # type: ignore[no-untyped-call]
        return out

    return join


def copy_to(x: Tensor, comm: Comm) -> Tensor:
    """``x``, equal on all ranks, on its way into split layers (Megatron's f)."""
    out: Tensor = _CopyTo.apply(x, comm)  # type: ignore[no-untyped-call]
    return out


def reduce_from(x: Tensor, comm: Comm) -> Tensor:
    """The sum of the ranks' shares ``x``, on its way out of split layers (Megatron's g)."""
    out: Tensor = _ReduceFrom.apply(x, comm)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x_nD: Tensor, comm: Comm, total: int) -> Tensor:
    """All ``total`` tokens [N, D] out of every rank's [n, D]."""
    out: Tensor = _GatherTokens.apply(x_nD, comm, total)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter_tokens(x_ND: Tensor, comm: Comm) -> Tensor:
    """This rank's tokens [n, D] of the sum of the ranks' shares [N, D]."""
    out: Tensor = _ReduceScatter.apply(x_ND, comm)  # type: ignore[no-untyped-call]
    return out


def scatter_tokens(x_ND: Tensor, comm: Comm) -> Tensor:
    """This rank's tokens [n, D] of ``x`` [N, D], which is equal on all ranks."""
    out: Tensor = _ScatterTokens.apply(x_ND, comm)  # type: ignore[no-untyped-call]
    return out


def enter(x: Tensor, comm: Comm, total: int, *, sp: bool) -> Tensor:
    """Tokens [N, D] as split layers want them; ``x`` is [n, D] with sequence parallelism."""
    if comm.world == 1:
        return x
    return gather_tokens(x, comm, total) if sp else copy_to(x, comm)


def leave(x_ND: Tensor, comm: Comm, *, sp: bool) -> Tensor:
    """The sum of what split layers made; [n, D] with sequence parallelism."""
    if comm.world == 1:
        return x_ND
    return reduce_scatter_tokens(x_ND, comm) if sp else reduce_from(x_ND, comm)
