"""Messages along rings of ranks, which travel while the caller computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.ir.mask import Mask
from shoal.parallel.context.pieces import AttentionPiece, block_pieces
from shoal.parallel.protocols import Comm, Pending


class ContextPeers:
    """A subset of a communicator's ranks, in a given order.

    Args:
        members: numbers in it; all of them, in order, if not given.
    """

    def __init__(self, comm: Comm, members: Sequence[int] | None = None) -> None:
        self.comm = comm
        self.members = tuple(members or range(comm.world))
        self.rank = self.members.index(comm.rank)
        self.world = len(self.members)

    def send(self, x: Tensor, target: int, tag: str) -> Pending:
        """Send ``x`` to the member ``target``."""
        return self.comm.send(x, self.members[target], tag=f"context.{tag}")

    def receive(self, out: Tensor, source: int, tag: str) -> Pending:
        """Receive from the member ``source``."""
        return self.comm.receive(out, self.members[source], tag=f"context.{tag}")

    def shift(self, x: Tensor, tag: str) -> tuple[Tensor, Callable[[], None]]:
        """Send ``x`` to the next member; what the previous one sent, and how to wait for it."""
        arriving = torch.empty_like(x)
        return arriving, self.swap(self.rank + 1, [x], self.rank - 1, [arriving], tag)

    def swap(
        self,
        target: int,
        sent: Sequence[Tensor],
        source: int,
        arriving: Sequence[Tensor],
        tag: str,
    ) -> Callable[[], None]:
        """Send to one member and receive from another, or from the same one; how to wait.

        Either list may be empty. A network without tags works off the messages of a pair in
        order, so of two that swap one must send first and the other receive first.
        """
        target, source = target % self.world, source % self.world

        def receive() -> list[Pending]:
            return [self.receive(x, source, tag) for x in arriving]

        first = receive() if target < self.rank else []
        pending = first + [self.send(x, target, tag) for x in sent]
        if target >= self.rank:
            pending += receive()

        def wait() -> None:
            for each in pending:
                each.wait()

        return wait

    def exchange(self, xs: Sequence[Tensor], tag: str) -> list[Tensor]:
        """Give each member its tensor of ``xs``, all of one shape; what each gave this one."""
        outs = [torch.empty_like(x) for x in xs]
        outs[self.rank] = xs[self.rank]
        waits = []
        for step in range(1, self.world):
            target, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            waits.append(self.swap(target, [xs[target]], source, [outs[source]], tag))
        for wait in waits:
            wait()
        return outs


class PeerView(NamedTuple):
    """What the queries of one member see of the keys of another.

    Args:
        masks: of the whole sequences; one for all rows, or one a row.
        batch: rows.
        positions: of each member.
    """

    masks: tuple[Mask, ...]
    batch: int
    positions: Sequence[np.ndarray]

    def pieces(self, queries: int, keys: int) -> tuple[AttentionPiece, ...]:
        """Pieces of the block of two members; both ends of a message get the same answer."""
        return block_pieces(self.masks, self.batch, self.positions[queries], self.positions[keys])


def circulate(x: Tensor, peers: ContextPeers, tag: str) -> Iterator[tuple[int, Tensor]]:
    """Every member's ``x`` and who it is from, own first; the next is on its way meanwhile.

    With tagged messages, as on CPUs, each receive is posted one step early: Gloo sends only after
    the receive is posted, and a late one would be queued after results in the same direction.
    """
    world, early = peers.world, x.device.type == "cpu"
    expected: list[tuple[Tensor, Pending]] = []
    for step in range(world):
        last, wait = step == world - 1, None
        if not last and early:
            while len(expected) < min(2, world - 1 - step):
                arriving = torch.empty_like(x)
                expected.append((arriving, peers.receive(arriving, (peers.rank - 1) % world, tag)))
            wait = peers.send(x, (peers.rank + 1) % world, tag).wait
        elif not last:
            arriving, wait = peers.shift(x, tag)
        yield (peers.rank - step) % world, x
        if wait is not None:
            wait()
            if expected:
                arriving, arrives = expected.pop(0)
                arrives.wait()
            x = arriving


class TravelingSums:
    """Partial sums that follow their chunk with a delay of one hop and end at its owner.

    Each of the N - 1 other ranks adds its share; a sum starts at the first of them, so it
    makes N - 1 hops.
    """

    def __init__(self, peers: ContextPeers, tag: str) -> None:
        self.peers = peers
        self.tag = tag
        self.home: Tensor | None = None
        self.partial: Tensor | None = None
        self.arriving: Tensor | None = None
        self._wait: Callable[[], None] | None = None

    def start(self) -> None:
        """Before the next chunk is computed: pass on the sum of the last one."""
        if self.partial is not None:
            self.arriving, self._wait = self.peers.shift(self.partial, self.tag)

    def add(self, share: Tensor) -> None:
        """The share of the chunk that was just computed; own first."""
        if self.home is None:
            self.home = share
            return
        if self._wait is not None and self.arriving is not None:
            self._wait()
            share = share.add_(self.arriving)
            self._wait = None
        self.partial = share

    def finish(self) -> Tensor:
        """The sum of this rank's own chunk over all ranks."""
        if self.home is None:
            raise ValueError("no share was added")
        if self.partial is not None:
            self.start()
            if self._wait is not None and self.arriving is not None:
                self._wait()
                self.home.add_(self.arriving)
        return self.home
