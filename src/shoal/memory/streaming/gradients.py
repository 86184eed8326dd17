"""Gradients leave the device as they come, and are added up where they live.

Those of several ranks are summed first: while one is summed the next is computed. One is on its way
from the device at a time.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 6.1 (each rank pushes its part).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from shoal.memory.tiers.mover import copied
from shoal.memory.tiers.places import chunks

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.ir.comm import Comm, Pending
    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.places import StagingRing, Tiers

# Gradients that are summed over the ranks while the next one is computed.
_SUMMING = 1


class _Sum(NamedTuple):
    """A gradient that the ranks are adding up."""

    home: OffloadedParameter
    whole: Tensor
    mine: Tensor
    pending: Pending


class GradientStream:
    """Sends gradients to their homes.

    Args:
        comm: the ranks that sum them; None for one rank alone.
        outgoing: staging buffers.
        scratch: one more, for what gradients are added to.

    Attributes:
        last: whether the gradients that come now complete their sums.
    """

    def __init__(
        self, tiers: Tiers, comm: Comm | None, outgoing: StagingRing, scratch: StagingRing
    ) -> None:
        self.tiers = tiers
        self.comm = comm if comm is not None and comm.world > 1 else None
        self.last = True
        self._outgoing, self._scratch = outgoing, scratch
        self._summing: deque[_Sum] = deque()
        self._leaving: deque[Ticket] = deque()
        self._writing: deque[Ticket] = deque()

    def settle(self) -> None:
        """Return when every gradient is where it belongs."""
        self._summed(0)
        for pending in (self._leaving, self._writing):
            while pending:
                pending.popleft().wait()

    def leaves(self, home: OffloadedParameter, gradient: Tensor) -> None:
        """A gradient is complete on this rank."""
        while self._leaving:
            self._leaving.popleft().wait()
        while self._writing and self._writing[0].done():
            self._writing.popleft().wait()
        self._send(home, gradient.detach().reshape(-1))
        self._summed(_SUMMING)

    def _send(self, home: OffloadedParameter, gradient: Tensor) -> None:
        """Begin to sum a gradient over the ranks; this rank's part goes where it lives."""
        cut, comm = home.cut, self.comm
        if comm is None:
            self._keep(home, gradient)
        elif cut.owner is not None:
            pending = comm.reduce(gradient, cut.owner, tag="gradients")
            self._summing.append(_Sum(home, gradient, gradient, pending))
        else:
            whole = gradient
            if cut.padded * comm.world != cut.whole:
                whole = gradient.new_zeros(cut.padded * comm.world)
                whole[: cut.whole] = gradient
            mine = gradient.new_empty(cut.padded)
            pending = comm.reduce_scatter(mine, whole, tag="gradients")
            self._summing.append(_Sum(home, whole, mine, pending))

    def _summed(self, most: int) -> None:
        """Wait until at most so many gradients are being summed; keep those that are."""
        while len(self._summing) > most:
            done = self._summing.popleft()
            done.pending.wait()
            self._keep(done.home, done.mine)

    def _keep(self, home: OffloadedParameter, mine: Tensor) -> None:
        """Add this rank's part of a gradient to what there is."""
        fresh, home.fresh = home.fresh, False
        for first, count in chunks(home.cut.numel, self._outgoing.nbytes // home.dtype.itemsize):
            self._leaving.append(self._copy_down(home, mine[first : first + count], first, fresh))

    def _copy_down(self, home: OffloadedParameter, part: Tensor, first: int, fresh: bool) -> Ticket:
        row, ring, last = home.gradient, self._outgoing, self.last
        assert row is not None
        nbytes = part.nbytes
        tensors: list[Tensor] = []

        def down() -> None:
            slot = ring.get()
            values = slot[:nbytes].view(part.dtype)
            copied(part, values)
            tensors.extend((values, slot))

        leaving = self.tiers.down.submit(down, nbytes)

        def write() -> None:
            leaving.wait()
            values, slot = tensors
            try:
                if not fresh:
                    second = self._scratch.get()
                    try:
                        values.add_(row.take(first, values.numel(), second))
                    finally:
                        self._scratch.put(second)
                row.give(first, values, slot)
                if last:
                    home.measure(first, values)
            finally:
                ring.put(slot)

        self._writing.append(self.tiers.write.submit(write, nbytes))
        return leaving
