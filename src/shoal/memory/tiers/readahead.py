"""Parameters on a disk that another process writes: waited for, and read ahead to the host.

The device often has no room for what comes next, and the host does. What is used soon is read into
buffers of the host; when the device has room, it comes from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.memory.tiers.places import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from shoal.memory.tiers.mover import Mover, Ticket
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.places import StagingRing, TierRow


class UpdatedRow:
    """A disk row that the other process writes; see :class:`~shoal.memory.tiers.places.TierRow`.

    Args:
        row: itself.
        pending: updates of the parameter that must be over.

    Attributes:
        early: first element -> the prefetch read and its buffer.
    """

    on_disk = True

    def __init__(self, row: TierRow, pending: list[Ticket]) -> None:
        self._row, self._pending = row, pending
        self.early: dict[int, tuple[Tensor, Tensor]] = {}
        self.done: StagingRing | None = None

    def settle(self) -> None:
        """Return when every update is written."""
        for ticket in tuple(self._pending):
            ticket.wait()

    def take(self, first: int, count: int, slot: Tensor | None) -> Tensor:
        """The elements, updated."""
        value = self.early.pop(first, None)
        if value is None:
            self.settle()
            return self._row.take(first, count, slot)
        values, buffer = value
        assert slot is not None
        assert self.done is not None
        here = slot[: values.nbytes].view(values.dtype).copy_(values)
        self.done.put(buffer)
        return here

    def give(self, first: int, values: Tensor, slot: Tensor | None) -> None:
        """Write the beginning of ``slot``."""
        self.settle()
        self._row.give(first, values, slot)

    def shown(self) -> Tensor:
        """The block, mapped, updated."""
        self.settle()
        return self._row.shown()


class DiskReadAhead:
    """Reads what is used next into buffers of the host.

    Args:
        ring: of the buffers, as large as those through which parameters come.
        count: of them.
        read: the way from the disk.
    """

    def __init__(self, ring: StagingRing, count: int, read: Mover) -> None:
        self._ring, self._count, self._read = ring, count, read
        self._begun: dict[OffloadedParameter, list[Ticket]] = {}

    def want(self, homes: Iterable[OffloadedParameter]) -> None:
        """Start to read parameters in this order, as many as there are buffers for."""
        used = 0
        for home in homes:
            pieces = list(self._pieces(home))
            used += len(pieces)
            if used > self._count:
                return
            if home in self._begun or home.flat is not None:
                continue
            if self._ring.free < len(pieces):
                return
            self._begun[home] = [self._submit(home, *piece) for piece in pieces]

    def _pieces(self, home: OffloadedParameter) -> Iterable[tuple[int, int]]:
        return chunks(home.cut.numel, self._ring.nbytes // home.dtype.itemsize)

    def _submit(self, home: OffloadedParameter, first: int, count: int) -> Ticket:
        row, buffer = home.weight, self._ring.get()
        assert isinstance(row, UpdatedRow)
        row.done = self._ring

        def read() -> None:
            try:
                values = row.take(first, count, buffer)
            except BaseException:
                self._ring.put(buffer)
                raise
            row.early[first] = values, buffer

        return self._read.submit(read, count * home.dtype.itemsize)

    def taken(self, home: OffloadedParameter) -> None:
        """A parameter goes to the device: what was read of it is used."""
        self._begun.pop(home, None)

    def drop(self) -> None:
        """Forget what was read and not used: it is of this step."""
        for home, tickets in self._begun.items():
            for ticket in tickets:
                ticket.wait()
            row = home.weight
            assert isinstance(row, UpdatedRow)
            for _, buffer in row.early.values():
                self._ring.put(buffer)
            row.early.clear()
        self._begun.clear()
