"""What is needed again in the backward pass waits on the host, or on a disk beyond it.

A storage leaves the device by one chained copy: to the host, and from there, where the host has no
room for it, through a few bounce buffers to the disk. What is saved first goes to the disk: it is
needed last. On the way back, what comes next fills whatever the device has left: the tensors of
a unit of the model in the order in which they were saved, the units in reverse order.

Source: Liao et al., Fuyou, 2024, section 4.4 (pipelined activation swapping).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import TierFullError
from shoal.memory.disk import SECTOR
from shoal.memory.tier import Block
from shoal.memory.tiers import chunks

if TYPE_CHECKING:
    from shoal.memory.mover import Ticket
    from shoal.memory.tiers import Ring, Tiers

__all__ = ["LEAST", "LEAVING", "Slip", "Swapping"]

LEAST = 4096
"""Bytes of a storage from which it pays to send it away."""

LEAVING = 2
"""What leaves the device at a time is no more than so many of the largest."""


# Units whose tensors are fetched ahead of their use.
_AHEAD = 4


class _Away:
    """One storage that waits.

    Attributes:
        source: the storage, while it lives.
        leaving: of the copy that frees the device.
        stored: of the one after which the bytes can be read again.
        fetched: its bytes, back on the device.
        coming: of the copy that brings them.
    """

    def __init__(
        self, block: Block, source: torch.UntypedStorage, group: int, *, on_disk: bool
    ) -> None:
        self.block, self.group, self.on_disk = block, group, on_disk
        self.source = weakref.ref(source)
        self.leaving: Ticket | None = None
        self.stored: Ticket | None = None
        self.fetched: Tensor | None = None
        self.coming: Ticket | None = None
        self.ended: _Ended | None = None


class _Ended:
    """Where the bytes are, which is free once they are there and nobody waits for them."""

    def __init__(self, block: Block, stored: Ticket, *, on_disk: bool) -> None:
        self.block, self.stored, self.on_disk = block, stored, on_disk


class Slip(NamedTuple):
    """What is kept in the place of a tensor."""

    away: _Away
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Swapping:
    """Sends storages away and brings them back.

    Args:
        tiers: places and ways.
        spare: bytes of the device that may be filled ahead of their use.
        outgoing: bounce buffers to the disk.
        incoming: bounce buffers from it.

    Attributes:
        group: unit of the model that is saved for; None where tensors stay.
        to_disk: of a micro-batch, bytes that go to the disk, from the first.
        sent: bytes that this micro-batch has sent away.
        waited_s: seconds for which the passes have waited.
    """

    def __init__(
        self, tiers: Tiers, spare: Callable[[], int], outgoing: Ring, incoming: Ring
    ) -> None:
        self._tiers, self._spare = tiers, spare
        self._outgoing, self._incoming = outgoing, incoming
        self._known: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        self._groups: dict[int, list[weakref.ref[_Away]]] = {}
        self._leaving: deque[Ticket] = deque()
        self._largest = 0
        self._ended: deque[_Ended] = deque()
        self.group: int | None = None
        self.to_disk: float = 0.0
        self.sent = 0
        self.waited_s = 0.0

    @property
    def reserve(self) -> int:
        """Bytes of the device that may be on their way out."""
        return LEAVING * self._largest

    @property
    def early_bytes(self) -> int:
        """Bytes on the device that nobody has asked for yet."""
        return sum(away.block.nbytes for away in self._known.values() if away.coming is not None)

    def restart(self) -> None:
        """From now on others are sent away."""
        self._largest = 0

    def begin(self) -> None:
        """A micro-batch begins; nothing waits from the one before."""
        self._settle()
        self._groups.clear()
        self._known.clear()
        self.sent = 0

    def pack(self, tensor: Tensor) -> Slip | Tensor:
        """Send the storage of a tensor away, once; what is of no block stays."""
        storage = tensor.untyped_storage()
        tiers = self._tiers
        here = tensor.device.type == tiers.device.device.type
        if self.group is None or storage.nbytes() < LEAST or not here:
            return tensor
        away = self._known.get(storage._cdata)
        if away is None or away.source() is not storage:
            away = self._send(tensor, storage, self.group)
        return Slip(
            away, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _send(self, tensor: Tensor, storage: torch.UntypedStorage, group: int) -> _Away:
        self._settle()
        nbytes = storage.nbytes()
        self._largest = max(self._largest, nbytes)
        while sum(t.nbytes for t in self._leaving) + nbytes > LEAVING * self._largest:
            self.waited_s += self._leaving.popleft().wait()
        block, on_disk = self._place(nbytes, f"saved {'x'.join(map(str, tensor.shape))}")
        self.sent += nbytes
        away = _Away(block, storage, group, on_disk=on_disk)
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(storage, 0, (nbytes,), (1,))
        if on_disk:
            self._to_disk(away, source)
        else:
            away.leaving = away.stored = self._tiers.down.copy(source, self._view(block))
        assert away.leaving is not None
        assert away.stored is not None
        self._leaving.append(away.leaving)
        self._groups.setdefault(group, []).append(weakref.ref(away))
        self._known[storage._cdata] = away
        away.ended = _Ended(block, away.stored, on_disk=on_disk)
        weakref.finalize(away, self._ended.append, away.ended).atexit = False
        return away

    def _place(self, nbytes: int, what: str) -> tuple[Block, bool]:
        """Where so many bytes go: to the disk first, and where the host is full."""
        tiers = self._tiers
        assert tiers.disk is not None
        if self.sent < self.to_disk:
            return tiers.disk.alloc(nbytes, what), True
        try:
            return tiers.host.alloc(nbytes, what), False
        except TierFullError:
            return tiers.disk.alloc(nbytes, what), True

    def _to_disk(self, away: _Away, source: Tensor) -> None:
        """Device to bounce buffer to disk, piece by piece."""
        tiers, ring, disk = self._tiers, self._outgoing, self._tiers.disk
        assert disk is not None
        block = away.block
        for first, count in chunks(block.nbytes, ring.nbytes):
            found: list[Tensor] = []

            def down(first: int = first, count: int = count, found: list[Tensor] = found) -> None:
                slot = ring.get()
                slot[:count].copy_(source[first : first + count])
                found.append(slot)

            leaving = away.leaving = tiers.down.submit(down, count)

            def write(
                first: int = first,
                count: int = count,
                found: list[Tensor] = found,
                leaving: Ticket = leaving,
            ) -> None:
                leaving.wait()
                slot = found.pop()
                try:
                    disk.write(block, slot[: -(-count // SECTOR) * SECTOR], first)
                    disk.stats.bytes_in += count
                finally:
                    ring.put(slot)

            away.stored = tiers.write.submit(write, count)

    def _view(self, block: Block) -> Tensor:
        with self._tiers.scope.outside():
            return self._tiers.host.view(block, torch.uint8, (block.nbytes,))

    def unpack(self, slip: Slip) -> Tensor:
        """The tensor again, on the device."""
        away = slip.away
        storage = away.source()
        if storage is None:
            if away.fetched is None:
                self._fetch(away)
            self._ahead(away)
            if away.coming is not None:
                self.waited_s += away.coming.wait()
                away.coming = None
            assert away.fetched is not None
            storage = away.fetched.untyped_storage()
        found = torch.empty(0, dtype=slip.dtype, device=self._tiers.device.device)
        return found.set_(storage, slip.offset, slip.shape, slip.stride)

    def _fetch(self, away: _Away) -> None:
        tiers, nbytes = self._tiers, away.block.nbytes
        fetched = torch.empty(nbytes, dtype=torch.uint8, device=tiers.device.device)
        stored = away.stored
        assert stored is not None
        away.fetched = fetched
        if away.on_disk:
            self._from_disk(away, fetched, stored)
            return
        from_host = self._view(away.block)

        def work() -> None:
            stored.wait()
            fetched.copy_(from_host)

        away.coming = tiers.up.submit(work, nbytes)

    def _from_disk(self, away: _Away, fetched: Tensor, stored: Ticket) -> None:
        """Disk to bounce buffer to device, piece by piece."""
        tiers, ring, disk = self._tiers, self._incoming, self._tiers.disk
        assert disk is not None
        block = away.block
        for first, count in chunks(block.nbytes, ring.nbytes):
            found: list[Tensor] = []

            def read(first: int = first, count: int = count, found: list[Tensor] = found) -> None:
                stored.wait()
                slot = ring.get()
                try:
                    disk.read(block, slot[: -(-count // SECTOR) * SECTOR], first)
                    disk.stats.bytes_out += count
                except BaseException:
                    ring.put(slot)
                    raise
                found.append(slot)

            reading = tiers.read.submit(read, count)

            def up(
                first: int = first,
                count: int = count,
                found: list[Tensor] = found,
                reading: Ticket = reading,
            ) -> None:
                reading.wait()
                slot = found.pop()
                try:
                    fetched[first : first + count].copy_(slot[:count])
                finally:
                    ring.put(slot)

            away.coming = tiers.up.submit(up, count)

    def _next(self, away: _Away) -> Iterator[_Away]:
        """What is wanted after this: the rest of its block, and the blocks before it."""
        for group in range(away.group, max(-1, away.group - _AHEAD), -1):
            for known in self._groups.get(group, ()):
                found = known()
                if found is not None:
                    yield found

    def _ahead(self, away: _Away) -> None:
        """Start to fetch what is wanted next, as far as the device has room."""
        spare = self._spare() - self.early_bytes
        for other in self._next(away):
            if other.fetched is not None or other.source() is not None:
                continue
            spare -= other.block.nbytes
            if spare >= 0:
                self._fetch(other)
            elif not other.on_disk or not self._to_host(other):
                return

    def _to_host(self, away: _Away) -> bool:
        """Have what lies on the disk on the host, which has room where the device has none."""
        tiers, disk, stored = self._tiers, self._tiers.disk, away.stored
        assert disk is not None
        assert stored is not None
        assert away.ended is not None
        self._settle()
        before = away.block
        if tiers.host.largest_hole < tiers.host.rounded(before.nbytes):
            return False
        block = tiers.host.alloc(before.nbytes, before.tag)
        whole = Block(block.start, tiers.host.rounded(block.nbytes), block.tag)
        with tiers.scope.outside():
            into = tiers.host.view(whole, torch.uint8, (whole.nbytes,))

        def read() -> None:
            stored.wait()
            disk.read(before, into)
            disk.stats.bytes_out += before.nbytes

        ticket = tiers.read.submit(read, before.nbytes)
        self._ended.append(_Ended(before, ticket, on_disk=True))
        away.block, away.stored, away.on_disk = block, ticket, False
        away.ended.block, away.ended.stored, away.ended.on_disk = block, ticket, False
        return True

    def make_room(self) -> None:
        """Return when everything that leaves the device has left."""
        while self._leaving:
            self.waited_s += self._leaving.popleft().wait()

    def _settle(self) -> None:
        """Give back the blocks of what nobody waits for any more."""
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()
        disk = self._tiers.disk
        assert disk is not None
        for _ in range(len(self._ended)):
            ended = self._ended.popleft()
            if not ended.stored.done():
                self._ended.append(ended)
            elif ended.on_disk:
                disk.free(ended.block)
            else:
                self._tiers.host.free(ended.block)
