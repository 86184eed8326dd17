"""Rows travel to experts node by node: fewer and longer messages between nodes.

The hops are those of :mod:`shoal.cost.price.expert_hops`; at each of them a rank sends every piece
that it has, the rows of one source for one target, to the rank that has it next. All ranks know
how many rows every rank has for every other, so both ends of a message know its pieces without a
header::

    2dh    source -> same node, place of the target -> target
    1dh    source -> first of its node -> first of the target's node -> target

Shapes: M rows, D hidden, R ranks that share out the experts, node by node.

Source: Pan et al., FSMoE, 2025, section 3; Nie et al., HetuMoE, 2022; Hwang et al., Tutel, 2023.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.cost.price.expert_hops import holders
from shoal.parallel.expert.exchange import TAG

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, Nodes, Pending

# The rows of one source for one target, by their numbers among the R ranks.
_Piece = tuple[int, int]


class _Hop(NamedTuple):
    """What a rank sends and gets in a hop.

    Args:
        gone: pieces to each rank of the hop's communicator.
        come: pieces from each.
    """

    gone: tuple[tuple[_Piece, ...], ...]
    come: tuple[tuple[_Piece, ...], ...]


@functools.cache
def _hops(dispatch: str, far: int, local: int, number: int) -> tuple[_Hop, ...]:
    """The hops of rank ``number`` of so many nodes with so many ranks each."""
    source_RR = np.indices((far * local,) * 2)[0]
    # The ranks of a hop: of this rank's node, or with its place.
    near = [number // local * local + place for place in range(local)]
    others = [number % local + node * local for node in range(far)]
    hops, before = [], source_RR
    for hop, after in enumerate(holders(dispatch, far, local)):

        def pieces(
            source: int,
            target: int,
            before: NDArray[np.int64] = before,
            after: NDArray[np.int64] = after,
        ) -> tuple[_Piece, ...]:
            held = np.argwhere((before == source) & (after == target))
            return tuple((int(a), int(b)) for a, b in held)

        peers = others if hop == 1 else near
        hops.append(
            _Hop(
                tuple(pieces(number, peer) for peer in peers),
                tuple(pieces(peer, number) for peer in peers),
            )
        )
        before = after
    return tuple(hops)


class Hops:
    """Rows on their way, hop by hop; all ranks make the same calls in the same order.

    The first hop is under way when this is made.

    Args:
        x_MD: this rank's rows, by target.
        rows_RR: how many each rank (row) has for each; on the host.
        nodes: the ranks by node.
        number: this rank's among all R.
    """

    def __init__(self, x_MD: Tensor, rows_RR: NDArray[np.int64], nodes: Nodes, number: int) -> None:
        self._hops = _hops(nodes.dispatch, nodes.far.world, nodes.near.world, number)
        self._nodes, self._sizes = nodes, rows_RR.tolist()
        self._pieces: tuple[_Piece, ...] = tuple((number, to) for to in range(len(rows_RR)))
        self._x_MD = self._coming = x_MD
        self._pending: Pending | None = None
        self._hop = 0
        self._start()

    @property
    def count(self) -> int:
        """Hops in all."""
        return len(self._hops)

    def go_on(self, hop: int) -> None:
        """Let hops up to ``hop`` be under way, of which the first is 1; wait for those before."""
        while self._hop < min(hop, self.count):
            self._arrive()
            self._start()

    def rows(self) -> Tensor:
        """All rows for this rank, by source, when they are there."""
        self.go_on(self.count)
        self._arrive()
        return self._ordered(tuple(sorted(self._pieces)))

    def _size(self, piece: _Piece) -> int:
        size: int = self._sizes[piece[0]][piece[1]]
        return size

    def _ordered(self, pieces: tuple[_Piece, ...]) -> Tensor:
        """This rank's rows with its pieces in another order."""
        if pieces == self._pieces:
            return self._x_MD
        cut = torch.split(self._x_MD, [self._size(piece) for piece in self._pieces])
        at = dict(zip(self._pieces, cut, strict=True))
        return torch.cat([at[piece] for piece in pieces])

    def _start(self) -> None:
        """Send every piece to the rank that has it after the next hop."""
        hop, comm = self._hops[self._hop], self._over(self._hop)
        self._hop += 1
        if comm is None:
            return
        x_MD = self._ordered(tuple(itertools.chain(*hop.gone)))
        sent, received = (
            [sum(map(self._size, pieces)) for pieces in every] for every in (hop.gone, hop.come)
        )
        self._pieces = tuple(itertools.chain(*hop.come))
        self._coming = x_MD.new_empty(sum(received), *x_MD.shape[1:])
        self._pending = comm.all_to_all(
            torch.split(self._coming, received), torch.split(x_MD, sent), tag=TAG
        )

    def _arrive(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._x_MD = None, self._coming

    def _over(self, hop: int) -> Comm | None:
        """The ranks of a hop; none where this rank has no peer to send to or get from."""
        nodes = self._nodes
        comm = nodes.far if hop == 1 else nodes.near
        idle = comm.world == 1 or (hop == 1 and nodes.dispatch == "1dh" and nodes.near.rank > 0)
        return None if idle else comm


class _Travelled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, rows_RR: NDArray[np.int64], nodes: Nodes, number: int
    ) -> Tensor:
        ctx.way = rows_RR.T, nodes, number
        return Hops(x_MD.contiguous(), rows_RR, nodes, number).rows()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Hops(grad.contiguous(), *ctx.way).rows(), None, None, None


def travelled(x_MD: Tensor, rows_RR: NDArray[np.int64], nodes: Nodes, number: int) -> Tensor:
    """Send rows to every rank by way of others, and get theirs, by source."""
    out: Tensor = _Travelled.apply(x_MD, rows_RR, nodes, number)  # type: ignore[no-untyped-call]
    return out
