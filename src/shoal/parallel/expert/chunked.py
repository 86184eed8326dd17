"""Rows travel to experts and back in chunks: the next ones travel while these are computed.

The rows of every (rank, expert) pair are cut in r parts that differ by one row at most, so both
ends know the sizes of all chunks from the counts of the whole. All chunks are sent at once; the
experts compute what has come, and each chunk goes home as soon as it is made. ::

    sent        D1 D2 D3        C1 C2 C3
    computed       E1 E2 E3

The backward pass does the same with gradients, in a number of chunks of its own: what it needs of
the forward pass is kept in the order in which the rows of all chunks together would have come.
Gradients of rows go home before those of weights are computed. Every row is multiplied with the
same matrices as if there were one chunk; bytes are the same, messages more.

Shapes: M rows of this rank, S segments, T rows that come here, D hidden, F width of a slice.

Source: Pan et al., FSMoE, 2025, section 4; Hwang et al., Tutel, 2023 (one number for both passes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernel.grouped.product import multiply, weight_gradient
from shoal.kernel.tensors import compute_dtype
from shoal.model.feedforward import gate
from shoal.parallel.expert.exchange import TAG
from shoal.parallel.expert.hierarchy import Hops
from shoal.parallel.tensor.linear import WeightGradients

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.parallel.expert.dispatch import DispatchedExperts
    from shoal.parallel.protocols import Comm, ExpertRanks, Pending

_Work = Callable[["_Chunk", Tensor], Tensor]


def parts(counts: Tensor, chunk: int, chunks: int) -> Tensor:
    """Of ``counts`` rows each, how many go with a chunk."""
    return counts * (chunk + 1) // chunks - counts * chunk // chunks


def places(counts_S: Tensor, chunk: int, chunks: int) -> Tensor:
    """Where the rows of a chunk lie among segments of ``counts_S`` rows behind each other."""
    begin_S = counts_S.cumsum(0) - counts_S + counts_S * chunk // chunks
    size_S = parts(counts_S, chunk, chunks)
    shift_S = begin_S - (size_S.cumsum(0) - size_S)
    return torch.arange(int(size_S.sum())) + shift_S.repeat_interleave(size_S)


class _Chunk(NamedTuple):
    """A part of the rows.

    Args:
        own: which rows of this rank.
        sent: how many to each rank of ep.
        received: how many from each.
        each: how many every rank of etp brings.
        order: the rows that came, by expert.
        here: where those lie among the rows of all chunks.
        counts: rows of each expert.
        across: rows that each rank of ep has for each, where they travel by node.
    """

    own: Tensor
    sent: list[int]
    received: list[int]
    each: list[int]
    order: Tensor
    here: Tensor
    counts: list[int]
    across: NDArray[np.int64] | None


class _Counts(NamedTuple):
    """How many rows there are.

    Args:
        sent: [ep, X] of this rank, to the experts of each rank of ep.
        every: [etp, ep, X] that come to each expert of this rank, by who brings and sent them.
        every_rank: [ep, ep, X] of each rank of ep, where rows travel by node.
    """

    sent: Tensor
    every: Tensor
    every_rank: Tensor | None


def _chunk(counts: _Counts, chunk: int, chunks: int, etp: Comm) -> _Chunk:
    to_RX, every, all_RRX = counts
    come = parts(every, chunk, chunks)
    experts = torch.arange(come.shape[-1]).repeat(come.shape[0] * come.shape[1])
    return _Chunk(
        own=places(to_RX.reshape(-1), chunk, chunks).to(etp.device),
        sent=parts(to_RX, chunk, chunks).sum(-1).tolist(),
        received=come[etp.rank].sum(-1).tolist(),
        each=come.sum((1, 2)).tolist(),
        order=torch.argsort(experts.repeat_interleave(come.view(-1)), stable=True).to(etp.device),
        here=places(every.permute(2, 0, 1).reshape(-1), chunk, chunks).to(etp.device),
        counts=come.sum((0, 1)).tolist(),
        across=None if all_RRX is None else parts(all_RRX, chunk, chunks).sum(-1).numpy(),
    )


class _Coming:
    """Rows on their way: of the ranks of ``comm`` behind each other, or their sum."""

    count = 1

    def __init__(self, xs: list[Tensor], rows: list[int], comm: Comm, *, summed: bool = False):
        self._summed = comm.world if summed and comm.world > 1 else 0
        self._pending: Pending | None = None
        if comm.world == 1:
            self._whole = xs[0]
            return
        self._whole = xs[0].new_empty(sum(rows), *xs[0].shape[1:])
        self._pending = comm.all_to_all(torch.split(self._whole, rows), xs, tag=TAG)

    def go_on(self, hop: int) -> None:
        """They are on their only way already; see :meth:`Hops.go_on`."""

    def rows(self) -> Tensor:
        """The rows, when they are there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._summed:
            whole = self._whole
            self._whole = whole.view(self._summed, -1, *whole.shape[1:]).sum(0)
            self._summed = 0
        return self._whole


_Rows = _Coming | Hops


def _across(x_MD: Tensor, one: _Chunk, ranks: ExpertRanks, *, home: bool) -> _Rows:
    """Send a chunk to the ranks of its experts, or home, straight or by node."""
    sent, received = (one.received, one.sent) if home else (one.sent, one.received)
    if one.across is None or ranks.nodes is None:
        return _Coming(list(torch.split(x_MD, sent)), received, ranks.ep)
    rows_RR = one.across.T if home else one.across
    return Hops(x_MD.contiguous(), rows_RR, ranks.nodes, ranks.ep.rank)


def _travel(
    rows_MD: Tensor,
    cut: list[_Chunk],
    ranks: ExpertRanks,
    work: _Work,
    sent: Callable[[], None] | None = None,
) -> list[Tensor]:
    """What ``work`` makes of each chunk where its experts are; [rows of the chunk, D] each.

    Every rank of ep sends all chunks, then gets them back in order; ranks of etp gather a chunk
    before they sum the one before it. ``sent`` is called once all chunks are on their way.
    """
    etp = ranks.etp
    coming = [_across(rows_MD[one.own], one, ranks, home=False) for one in cut]
    if sent is not None:
        sent()
    ahead = 1 if etp.world > 1 else 0
    gathered: list[_Coming] = []
    summed: list[tuple[_Chunk, _Coming]] = []
    back: list[_Rows] = []

    def home() -> None:
        """Send the oldest chunk that was summed back to where its rows came from."""
        one, sums = summed.pop(0)
        back.append(_across(sums.rows(), one, ranks, home=True))
        for older, chunk in enumerate(reversed(back)):
            chunk.go_on(1 + older)

    for step in range(len(cut) + ahead):
        if step < len(cut):
            # While a chunk is computed, the next one is in its last hop, or on its only way.
            for later, chunk in enumerate(coming[step : step + 3]):
                chunk.go_on(chunk.count + 1 - max(1, later))
            rows = coming[step].rows()
            gathered.append(_Coming([rows] * etp.world, cut[step].each, etp))
        if step < ahead:
            continue
        one = cut[step - ahead]
        made = work(one, gathered[step - ahead].rows()[one.order])
        made = torch.empty_like(made).index_copy(0, one.order, made)
        mine = [one.each[etp.rank]] * etp.world
        summed.append((one, _Coming(list(torch.split(made, one.each)), mine, etp, summed=True)))
        # A sum over etp travels while the next chunk is computed.
        while len(summed) > ahead:
            home()
    while summed:
        home()
    return [one.rows() for one in back]


class _Chunked(torch.autograd.Function):
    """Out and back in chunks; see the file's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MD: Tensor,
        gate_up: Tensor,
        down: Tensor,
        counts: _Counts,
        layer: DispatchedExperts,
    ) -> Tensor:
        dtype = compute_dtype(rows_MD)
        casts = gate_up.to(dtype), down.to(dtype)
        total, width = int(counts.every.sum()), gate_up.shape[1]
        kept = rows_MD.new_empty(total, rows_MD.shape[1], dtype=dtype)
        gates = rows_MD.new_empty(total, width, dtype=dtype)
        activate, product = layer.kernel or gate, partial(multiply, backend=layer.grouped)

        def work(one: _Chunk, x: Tensor) -> Tensor:
            x = x.to(dtype)
            up = product(x, casts[0], one.counts)
            kept[one.here], gates[one.here] = x, up
            return product(activate(up), casts[1], one.counts)

        count = layer.chunks[0]
        cut = [_chunk(counts, i, count, layer.ranks.etp) for i in range(count)]
        out = rows_MD.new_empty(rows_MD.shape, dtype=dtype)
        for one, made in zip(cut, _travel(rows_MD, cut, layer.ranks, work), strict=True):
            out[one.own] = made
        ctx.save_for_backward(kept, gates, *casts)
        ctx.layer, ctx.counts, ctx.weights = layer, counts, (gate_up, down)
        ctx.dtype = rows_MD.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        kept, gates, up_XFD, down_XDF = ctx.saved_tensors
        layer: DispatchedExperts = ctx.layer
        activate, product = layer.kernel or gate, partial(multiply, backend=layer.grouped)
        of_weight = partial(weight_gradient, backend=layer.grouped)
        store = WeightGradients.current(grad_MD.device)
        totals: list[Tensor | None] = [None, None]
        # Of each chunk, what its weights' gradients are made of, once its rows are on their way.
        owed: list[tuple[list[int], tuple[tuple[Tensor, Tensor], ...]]] = []

        def work(one: _Chunk, grad: Tensor) -> Tensor:
            pay()
            up = gates[one.here].requires_grad_(True)
            with torch.enable_grad():
                gated = activate(up)
            of_gated = product(grad, down_XDF.transpose(1, 2), one.counts)
            (of_up,) = torch.autograd.grad(gated, up, of_gated)
            owed.append((one.counts, ((of_up, kept[one.here]), (grad, gated.detach()))))
            return product(of_up, up_XFD.transpose(1, 2), one.counts).to(ctx.dtype)

        def pay() -> None:
            """Add the weights' gradients of the chunk before; later, if they are put off."""
            while owed:
                counts, pairs = owed.pop()
                for number, (grad, x) in enumerate(pairs):
                    if not ctx.needs_input_grad[1 + number]:
                        continue
                    if store is None:
                        result, total = of_weight(grad, x, counts), totals[number]
                        # In the parameter's type, which may be wider than that of the products.
                        result = result.to(ctx.weights[number].dtype)
                        totals[number] = result if total is None else total.add_(result)
                    else:
                        store.put_off(
                            partial(_owed, ctx.weights[number], of_weight, grad, x, counts)
                        )

        count = layer.chunks[1]
        cut = [_chunk(ctx.counts, i, count, layer.ranks.etp) for i in range(count)]
        out = torch.empty_like(grad_MD, dtype=ctx.dtype)
        hole = None if layer.holes is None else partial(layer.holes, 0)
        result = _travel(grad_MD.contiguous(), cut, layer.ranks, work, hole)
        if layer.holes is not None:
            layer.holes(1)
        pay()
        for one, made in zip(cut, result, strict=True):
            out[one.own] = made
        return out, *totals, None, None


def _owed(
    weight: Tensor,
    gradient: Callable[[Tensor, Tensor, list[int]], Tensor],
    grad_TO: Tensor,
    x_TI: Tensor,
    counts: list[int],
) -> tuple[Tensor, Tensor]:
    return weight, gradient(grad_TO, x_TI, counts)


def chunked(
    rows_MD: Tensor,
    to_RX: Tensor,
    every: Tensor,
    all_RRX: Tensor | None,
    layer: DispatchedExperts,
) -> Tensor:
    """What the experts make of rows that are sorted by expert, in the same order.

    Args:
        rows_MD: of this rank.
        to_RX: how many of them go to each expert of each rank of ep.
        every: [etp, ep, X] how many come to each expert of this rank, by who brings and who sent
            them.
        all_RRX: counts of each rank of ep, for a hierarchical all-to-all.
        layer: whose chunks, ranks, matrices and activation these are.
    """
    out: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        rows_MD, layer.gate_up_proj, layer.down_proj, _Counts(to_RX, every, all_RRX), layer
    )
    return out
