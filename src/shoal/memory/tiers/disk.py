"""A tier in a file, read and written past the system's cache of pages.

The file has no name from the moment it is open, so nothing of it outlives the process. Transfers
are whole sectors from and to aligned memory (``O_DIRECT``). A file system that refuses that is
used through the cache, which is written back and dropped after every transfer: slower, but still
the disk.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 6.3 (aligned, direct, asynchronous I/O).
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import MachineError, TierFullError
from shoal.core.sizes import human_bytes
from shoal.memory.tiers.tier import TierAllocator, TierBlock

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.tiers.mover import EmulatedLink

SECTOR = 4096
"""Bytes: what a transfer past the cache begins at and consists of."""


def staging(nbytes: int) -> Tensor:
    """Memory of whole sectors that disk transfers can use, uint8 of at least ``nbytes``."""
    import torch

    size = -(-nbytes // SECTOR) * SECTOR
    whole = torch.empty(size + SECTOR, dtype=torch.uint8)
    first = -whole.data_ptr() % SECTOR
    return whole[first : first + size]


class DiskTier(TierAllocator):
    """Blocks in a file.

    Args:
        path: directory in which the file lies.
        capacity: budget in bytes.
        links: hold reading and writing to a rate, for all callers together.

    Attributes:
        direct: whether transfers pass the cache by; False where the file system refuses it.

    Raises:
        MachineError: the directory cannot be written.
        TierFullError: its disk has less room.
    """

    def __init__(
        self,
        path: Path | str,
        capacity: int,
        *,
        links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None),
    ) -> None:
        super().__init__("disk", capacity, SECTOR)
        self._map: mmap.mmap | None = None
        self.path, self.links = Path(path), links
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
            if free < capacity:
                raise TierFullError(
                    f"disk: {self.path} has {human_bytes(free)} free and {human_bytes(capacity)} "
                    "are needed; give another path or a smaller model"
                )
            made, name = tempfile.mkstemp(prefix=".shoal-tier-", dir=self.path)
            try:
                self._fd, self.direct = self._reopened(made, name)
            finally:
                os.unlink(name)
                os.close(made)
            os.ftruncate(self._fd, -(-capacity // SECTOR) * SECTOR)
        except OSError as cause:
            raise MachineError(
                f"disk: {self.path} cannot be written ({cause.strerror or cause}); "
                "give another path"
            ) from cause

    @classmethod
    def of(
        cls,
        descriptor: int,
        path: Path,
        capacity: int,
        *,
        direct: bool,
        links: tuple[EmulatedLink | None, EmulatedLink | None],
    ) -> DiskTier:
        """The file of another process, which keeps its books; blocks are read and written here."""
        made = cls.__new__(cls)
        TierAllocator.__init__(made, "disk", capacity, SECTOR)
        made._map, made._fd, made.direct = None, descriptor, direct
        made.path, made.links = path, links
        return made

    @property
    def descriptor(self) -> int:
        """Of the file."""
        return self._fd

    def _reopened(self, made: int, name: str) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            fd = os.open(name, flags | getattr(os, "O_DIRECT", 0))
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
            return os.open(name, flags), False
        return fd, hasattr(os, "O_DIRECT")

    def read(self, block: TierBlock, into: Tensor, offset: int = 0) -> None:
        """Fill ``into``, uint8 of :func:`staging`, from byte ``offset`` of a block, a sector's."""
        self._whole(block, into, offset, writing=False)

    def write(self, block: TierBlock, data: Tensor, offset: int = 0) -> None:
        """Write ``data``, uint8 of :func:`staging`, from byte ``offset`` of a block, a sector's."""
        self._whole(block, data, offset, writing=True)

    def mapped(self, block: TierBlock) -> Tensor:
        """A block as uint8 that the system reads and writes as it is touched.

        For callers that read everything once and must not hold it all, such as a checkpoint. It
        takes the way through the cache; :meth:`flush` writes what has changed.
        """
        import torch

        if self._map is None:
            self._map = mmap.mmap(self._fd, -(-self.capacity // SECTOR) * SECTOR)
        return torch.frombuffer(
            self._map, dtype=torch.uint8, count=block.nbytes, offset=block.start
        )

    def flush(self) -> None:
        """Write what was changed in mapped blocks."""
        if self._map is not None:
            self._map.flush()

    def _whole(self, block: TierBlock, data: Tensor, offset: int, *, writing: bool) -> None:
        size = min(self.rounded(block.nbytes) - offset, data.numel())
        view = memoryview(data.numpy())[:size]  # type: ignore[arg-type]
        link = self.links[writing]
        through = 0.0 if link is None else link.book(size)
        done = 0
        try:
            while done < size:
                place = block.start + offset + done
                move = os.pwritev if writing else os.preadv
                moved = move(self._fd, [view[done:]], place)
                if not moved:
                    raise MachineError(
                        f"disk: {self.path}: {block.tag} ends at byte {offset + done}"
                    )
                done += moved
            if not self.direct:
                if writing:
                    os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, block.start + offset, size, os.POSIX_FADV_DONTNEED)
        except OSError as cause:
            if cause.errno in (errno.ENOSPC, errno.EDQUOT):
                raise TierFullError(
                    f"disk: {self.path} is full: {block.tag} needs {human_bytes(size)}; free "
                    "some room or give another path"
                ) from cause
            raise MachineError(
                f"disk: {self.path}: {block.tag} cannot be {'written' if writing else 'read'} "
                f"({cause.strerror or cause})"
            ) from cause
        if link is not None:
            time.sleep(max(0.0, through - time.perf_counter()))

    def close(self) -> None:
        """Give the file back to the disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None  # a remaining view of a block keeps the mapping
