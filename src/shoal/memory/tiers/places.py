"""The places of one rank's run, and the ways between them.

Each way has a thread: disk to host, host to device, device to host, host to disk.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.core.errors import require
from shoal.memory.tiers.device import DeviceScope
from shoal.memory.tiers.disk import SECTOR, DiskTier
from shoal.memory.tiers.mover import EmulatedLink, Mover
from shoal.memory.tiers.tier import BudgetedTier, TierBlock

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Place = Literal["device", "host", "disk"]


class StagingRing:
    """A fixed number of aligned pieces of host memory that disk transfers go through.

    Args:
        tier: the host's memory.
        count: pieces.
        nbytes: of each, rounded up to sectors.
        tag: what for.
    """

    def __init__(self, tier: BudgetedTier, count: int, nbytes: int, tag: str) -> None:
        import torch

        self.nbytes = -(-nbytes // SECTOR) * SECTOR
        self._slots: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(count):
            block = tier.alloc(self.nbytes, tag)
            self._slots.put(tier.view(block, torch.uint8, (self.nbytes,)))

    def get(self) -> Tensor:
        """A free piece, uint8; waits for one."""
        return self._slots.get()

    @property
    def free(self) -> int:
        """Pieces that are free."""
        return self._slots.qsize()

    def put(self, slot: Tensor) -> None:
        """Give a piece back."""
        self._slots.put(slot)


class TierRow(Protocol):
    """Elements of one kind in one tier, counted from 0. Called from the movers' threads."""

    on_disk: bool

    def take(self, first: int, count: int, slot: Tensor | None) -> Tensor:
        """``count`` elements from ``first``: where they lie, or read into ``slot``."""

    def give(self, first: int, values: Tensor, slot: Tensor | None) -> None:
        """Keep ``values``, which :meth:`take` gave, or which are the beginning of ``slot``."""

    def shown(self) -> Tensor:
        """All elements, for a single pass over them; may be written."""


class MemoryRow:
    """See :class:`TierRow`.

    Args:
        tag: what they are.
    """

    on_disk = False

    def __init__(self, tier: BudgetedTier, numel: int, dtype: torch.dtype, tag: str) -> None:
        self._values = tier.view(tier.alloc(numel * dtype.itemsize, tag), dtype, (numel,)).zero_()

    def take(self, first: int, count: int, slot: Tensor | None) -> Tensor:
        """The elements themselves."""
        return self._values[first : first + count]

    def give(self, first: int, values: Tensor, slot: Tensor | None) -> None:
        """Copy what does not lie here already."""
        mine = self._values[first : first + values.numel()]
        if mine.data_ptr() != values.data_ptr():
            mine.copy_(values)

    def shown(self) -> Tensor:
        """The elements themselves."""
        return self._values


class DiskRow:
    """See :class:`TierRow`; elements are read and written by whole sectors, from sector bounds.

    Args:
        tag: what they are.

    Attributes:
        block: where they lie.
    """

    on_disk = True

    def __init__(self, tier: DiskTier, numel: int, dtype: torch.dtype, tag: str) -> None:
        self._tier, self._numel, self._dtype = tier, numel, dtype
        self.block: TierBlock = tier.alloc(numel * dtype.itemsize, tag)

    def take(self, first: int, count: int, slot: Tensor | None) -> Tensor:
        """Read into ``slot``."""
        assert slot is not None
        size = self._dtype.itemsize
        rounded = -(-count * size // SECTOR) * SECTOR
        self._tier.read(self.block, slot[:rounded], first * size)
        self._tier.stats.bytes_out += count * size
        return slot[: count * size].view(self._dtype)

    def give(self, first: int, values: Tensor, slot: Tensor | None) -> None:
        """Write the beginning of ``slot``."""
        assert slot is not None
        assert values.data_ptr() == slot.data_ptr()
        size = self._dtype.itemsize
        rounded = -(-values.nbytes // SECTOR) * SECTOR
        self._tier.write(self.block, slot[:rounded], first * size)
        self._tier.stats.bytes_in += values.nbytes

    def shown(self) -> Tensor:
        """The block, mapped."""
        return self._tier.mapped(self.block).view(self._dtype)


class Tiers:
    """Device, host and disk of one rank, with their movers.

    Args:
        disk_bytes: budget of the disk; 0 for none.
        path: directory of the disk's file.
        links: mover -> what holds it to a rate; movers are read, up, down and write.
        strict: operators may only use what lies on the device.
        disk_links: hold reading and writing of the disk to a rate, for all callers together.

    Raises:
        ConfigError: a way is held to two rates.
        MachineError: the path cannot be written.
        TierFullError: its disk has less room.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        device_bytes: int,
        host_bytes: int,
        disk_bytes: int = 0,
        path: Path | None = None,
        links: Mapping[str, EmulatedLink] | None = None,
        strict: bool = True,
        disk_links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None),
    ) -> None:
        links = links or {}
        for way, of_disk in zip(("read", "write"), disk_links, strict=True):
            require(
                way not in links or of_disk is None,
                f"links.{way}",
                links.get(way),
                expected="one link for a way: that of its mover, or that of the disk itself",
            )
        self.device = BudgetedTier("device", device_bytes, device)
        gpu = self.device.device.type == "cuda"
        self.host = BudgetedTier("host", host_bytes, alignment=SECTOR, pinned=gpu)
        if gpu:
            _hold(self.device)
        self.disk: DiskTier | None = None
        if disk_bytes:
            assert path is not None
            self.disk = DiskTier(path, disk_bytes, links=disk_links)
        self.scope = DeviceScope(self.device, strict=strict)
        where = str(self.device.device)

        def mover(name: str) -> Mover:
            on = where if name in ("up", "down") else "cpu"
            return Mover(name, link=links.get(name), depth=256, device=on)

        self.read, self.up = mover("read"), mover("up")
        self.down, self.write = mover("down"), mover("write")

    @property
    def movers(self) -> tuple[Mover, ...]:
        """All of them."""
        return self.read, self.up, self.down, self.write

    def used(self) -> dict[str, int]:
        """Tier -> bytes in use now."""
        result = {"device": self.device.capacity - self.scope.room, "host": self.host.stats.used}
        if self.device.device.type == "cuda":
            import torch

            result["device"] = torch.cuda.memory_allocated(self.device.device)
        return result | ({"disk": self.disk.stats.used} if self.disk is not None else {})

    def peaks(self) -> dict[str, int]:
        """Tier -> most bytes in use at one time."""
        result = {"device": self.device.stats.peak, "host": self.host.stats.peak}
        if self.device.device.type == "cuda":
            import torch

            result["device"] = torch.cuda.max_memory_allocated(self.device.device)
        return result | ({"disk": self.disk.stats.peak} if self.disk is not None else {})

    def close(self) -> None:
        """End the movers and give the disk's file back."""
        for mover in self.movers:
            mover.close()
        if self.disk is not None:
            self.disk.close()


def _hold(device: BudgetedTier) -> None:
    """Have the GPU's allocator keep the budget."""
    import torch

    total = torch.cuda.get_device_properties(device.device).total_memory
    device.capacity = min(device.capacity, total)
    torch.cuda.set_per_process_memory_fraction(device.capacity / total, device.device)


def make_row(tiers: Tiers, place: Place, numel: int, dtype: torch.dtype, tag: str) -> TierRow:
    """Elements in a tier, all zero."""
    if place == "disk":
        assert tiers.disk is not None
        return DiskRow(tiers.disk, numel, dtype, tag)
    return MemoryRow(tiers.host if place == "host" else tiers.device, numel, dtype, tag)


def chunks(numel: int, most: int) -> Iterator[tuple[int, int]]:
    """First element and number of elements of pieces of at most ``most``."""
    for first in range(0, numel, most):
        yield first, min(most, numel - first)
