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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import TierFullError
from shoal.memory.activations.offloaded import OffloadedStorage, StorageOffload, TensorPlaceholder
from shoal.memory.tiers.disk import SECTOR
from shoal.memory.tiers.places import chunks
from shoal.memory.tiers.tier import TierBlock

if TYPE_CHECKING:
    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.places import StagingRing, Tiers

# Units whose tensors are fetched ahead of their use.
_AHEAD = 4


class _Swapped(OffloadedStorage):
    """One storage that waits.

    Attributes:
        stored: of the copy after which the bytes can be read again.
    """

    def __init__(
        self, block: TierBlock, source: torch.UntypedStorage, group: int, *, on_disk: bool
    ) -> None:
        super().__init__(block, source)
        self.group, self.on_disk = group, on_disk
        self.stored: Ticket | None = None
        self.ended: _Ended | None = None


class _Ended:
    """Where the bytes are, which is free once they are there and not waited for."""

    def __init__(self, block: TierBlock, stored: Ticket, *, on_disk: bool) -> None:
        self.block, self.stored, self.on_disk = block, stored, on_disk


class ActivationSwapping(StorageOffload[_Swapped]):
    """Sends storages away and brings them back.

    Args:
        spare: bytes of the device that may be filled ahead of their use.
        outgoing: bounce buffers to the disk.
        incoming: bounce buffers from it.

    Attributes:
        group: unit of the model that is saved for; None where tensors stay.
        to_disk: of a micro-batch, bytes that go to the disk, from the first.
        sent: bytes that this micro-batch has sent away.
    """

    most_leaving = 2

    def __init__(
        self, tiers: Tiers, spare: Callable[[], int], outgoing: StagingRing, incoming: StagingRing
    ) -> None:
        super().__init__(tiers, spare)
        self._outgoing, self._incoming = outgoing, incoming
        self._groups: dict[int, list[weakref.ref[_Swapped]]] = {}
        self._ended: deque[_Ended] = deque()
        self.group: int | None = None
        self.to_disk: float = 0.0
        self.sent = 0

    @property
    def reserve(self) -> int:
        """Bytes of the device that may be on their way out."""
        return self.most_leaving * self._largest

    @property
    def early_bytes(self) -> int:
        """Bytes on the device that were prefetched and not requested yet."""
        return sum(away.block.nbytes for away in self._known.values() if away.coming is not None)

    def restart(self) -> None:
        """From now on others are sent away."""
        self._largest = 0

    def begin(self) -> None:
        """A micro-batch begins; nothing waits from the one before."""
        self.settle()
        self._groups.clear()
        self._known.clear()
        self.sent = 0

    def stays(self, tensor: Tensor) -> bool:
        """What is of no unit of the model stays too."""
        return self.group is None or super().stays(tensor)

    def pack_result(self, tensor: Tensor) -> TensorPlaceholder | Tensor:
        """Send a result of a chosen operator away, however small.

        What stayed would lie on the device for the whole pass, where nothing lies of an operator
        that is done again: a step that swaps would need more of it than one that does not.
        """
        there = tensor.device.type == self._tiers.device.device.type
        if self.group is None or not there or not tensor.untyped_storage().nbytes():
            return tensor
        return self.sent_away(tensor)

    def _send(self, source: Tensor, storage: torch.UntypedStorage, what: str) -> _Swapped:
        group, nbytes = self.group, source.nbytes
        assert group is not None
        block, on_disk = self._place(nbytes, what)
        self.sent += nbytes
        away = _Swapped(block, storage, group, on_disk=on_disk)
        if on_disk:
            self._to_disk(away, source)
        else:
            away.leaving = away.stored = self._tiers.down.copy(source, self._view(block))
        assert away.stored is not None
        self._groups.setdefault(group, []).append(weakref.ref(away))
        away.ended = _Ended(block, away.stored, on_disk=on_disk)
        weakref.finalize(away, self._ended.append, away.ended).atexit = False
        return away

    def _place(self, nbytes: int, what: str) -> tuple[TierBlock, bool]:
        """Where so many bytes go: to the disk first, and where the host is full."""
        tiers = self._tiers
        assert tiers.disk is not None
        if self.sent < self.to_disk:
            return tiers.disk.alloc(nbytes, what), True
        try:
            return tiers.host.alloc(nbytes, what), False
        except TierFullError:
            return tiers.disk.alloc(nbytes, what), True

    def _to_disk(self, away: _Swapped, source: Tensor) -> None:
        """Device to bounce buffer to disk, piece by piece."""
        tiers, ring, disk = self._tiers, self._outgoing, self._tiers.disk
        assert disk is not None
        block = away.block
        for first, count in chunks(block.nbytes, ring.nbytes):
            tensors: list[Tensor] = []

            def down(first: int = first, count: int = count, found: list[Tensor] = tensors) -> None:
                slot = ring.get()
                slot[:count].copy_(source[first : first + count])
                found.append(slot)

            leaving = away.leaving = tiers.down.submit(down, count)

            def write(
                first: int = first,
                count: int = count,
                found: list[Tensor] = tensors,
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

    def _fetch(self, away: _Swapped) -> None:
        assert away.stored is not None
        if away.on_disk:
            self._from_disk(away, self._made(away), away.stored)
        else:
            self._from_host(away, away.stored)

    def _from_disk(self, away: _Swapped, fetched: Tensor, stored: Ticket) -> None:
        """Disk to bounce buffer to device, piece by piece."""
        tiers, ring, disk = self._tiers, self._incoming, self._tiers.disk
        assert disk is not None
        block = away.block
        for first, count in chunks(block.nbytes, ring.nbytes):
            tensors: list[Tensor] = []

            def read(first: int = first, count: int = count, found: list[Tensor] = tensors) -> None:
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
                found: list[Tensor] = tensors,
                reading: Ticket = reading,
            ) -> None:
                reading.wait()
                slot = found.pop()
                try:
                    fetched[first : first + count].copy_(slot[:count])
                finally:
                    ring.put(slot)

            away.coming = tiers.up.submit(up, count)

    def _next(self, away: _Swapped) -> Iterator[_Swapped]:
        """What is wanted after this: the rest of its block, and the blocks before it."""
        for group in range(away.group, max(-1, away.group - _AHEAD), -1):
            for known in self._groups.get(group, ()):
                result = known()
                if result is not None:
                    yield result

    def _ahead(self, away: _Swapped) -> None:
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

    def _to_host(self, away: _Swapped) -> bool:
        """Have what lies on the disk on the host, which has room where the device has none."""
        tiers, disk, stored = self._tiers, self._tiers.disk, away.stored
        assert disk is not None
        assert stored is not None
        assert away.ended is not None
        self.settle()
        before = away.block
        if tiers.host.largest_hole < tiers.host.rounded(before.nbytes):
            return False
        block = tiers.host.alloc(before.nbytes, before.tag)
        whole = TierBlock(block.start, tiers.host.rounded(block.nbytes), block.tag)
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

    def settle(self) -> None:
        """Give back the blocks of what is no longer waited for."""
        super().settle()
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
