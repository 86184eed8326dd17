"""Rows of uneven numbers between ranks, as functions with a gradient.

===============  ====================  ====================
function         forward               backward
===============  ====================  ====================
``exchanged``    all-to-all            all-to-all, back
``spread``       all-gather            reduce-scatter
``combined``     reduce-scatter        all-gather
===============  ====================  ====================

Sums are taken in rank order. Numbers of rows are known to both ends before anything travels
(:func:`counts_of`).

Shapes: rows [M, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

# Under this tag the meter counts rows that travel to experts and back, and their gradients.
TAG = "experts"
_COUNTS = "expert_counts"


def counts_of(table: Tensor, comm: Comm, *, per_rank: bool) -> Tensor:
    """What every rank of ``comm`` says, one row each; int64, on the host.

    Args:
        table: [world, n] a row for each rank, or [n] the same for all.
        comm: the ranks.
        per_rank: a rank gets the row that is for it.

    Returns:
        [world, n].
    """
    if comm.world == 1:
        return table.reshape(1, -1).cpu()
    out = torch.empty(comm.world, table.shape[-1], dtype=torch.int64, device=comm.device)
    mine = table.to(comm.device)
    if per_rank:
        comm.all_to_all(list(out.unbind(0)), list(mine.unbind(0)), tag=_COUNTS).wait()
    else:
        comm.all_gather(out.view(-1), mine.contiguous(), tag=_COUNTS).wait()
    return out.cpu()


def _all_to_all(xs: Sequence[Tensor], received: Sequence[int], comm: Comm) -> Tensor:
    """What every rank has for this one, behind each other."""
    whole = xs[0].new_empty(sum(received), *xs[0].shape[1:])
    comm.all_to_all(torch.split(whole, list(received)), xs, tag=TAG).wait()
    return whole


def _gathered(x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
    return _all_to_all([x_MD.contiguous()] * comm.world, rows, comm)


def _scattered(x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
    mine = rows[comm.rank]
    parts = _all_to_all(torch.split(x_MD.contiguous(), list(rows)), [mine] * comm.world, comm)
    return parts.view(comm.world, mine, *x_MD.shape[1:]).sum(0)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.comm = sent, received, comm
        return _all_to_all(torch.split(x_MD.contiguous(), list(sent)), received, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        parts = torch.split(grad.contiguous(), list(ctx.received))
        return _all_to_all(parts, ctx.sent, ctx.comm), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
        ctx.rows, ctx.comm = rows, comm
        return _gathered(x_MD, rows, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(grad, ctx.rows, ctx.comm), None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
        ctx.rows, ctx.comm = rows, comm
        return _scattered(x_MD, rows, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.rows, ctx.comm), None, None


def exchanged(x_MD: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm) -> Tensor:
    """Send rows to every rank, and get theirs, behind each other in rank order.

    Args:
        x_MD: rows for rank 0, for rank 1, and so on.
        sent: how many for each.
        received: how many come from each.
        comm: the ranks.
    """
    if comm.world == 1:
        return x_MD
    out: Tensor = _Exchanged.apply(x_MD, sent, received, comm)  # type: ignore[no-untyped-call]
    return out


def spread(x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
    """The rows of all ranks, behind each other in rank order; ``rows`` says how many each has."""
    if comm.world == 1:
        return x_MD
    out: Tensor = _Spread.apply(x_MD, rows, comm)  # type: ignore[no-untyped-call]
    return out


def combined(x_MD: Tensor, rows: Sequence[int], comm: Comm) -> Tensor:
    """This rank's rows of the sum over the ranks; ``rows`` says how many each rank gets."""
    if comm.world == 1:
        return x_MD
    out: Tensor = _Combined.apply(x_MD, rows, comm)  # type: ignore[no-untyped-call]
    return out
