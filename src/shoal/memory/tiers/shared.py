"""Memory and emulated links that two processes have in common.

The memory has no name (``memfd``): it is known by a descriptor that a child is given, and it is
gone with the last process that has it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from typing import TYPE_CHECKING

from shoal.memory.tiers.mover import EmulatedLink

if TYPE_CHECKING:
    from torch import Tensor


class SharedPages:
    """Bytes that are whole pages.

    Args:
        nbytes: how many; those of the other process are as many.
        descriptor: that the other process has given; new memory if there is none.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("shoal")
            os.ftruncate(descriptor, nbytes)
        self.nbytes, self.descriptor = nbytes, descriptor
        self._map = mmap.mmap(descriptor, nbytes)

    def bytes_at(self, start: int, nbytes: int) -> Tensor:
        """Some of them, uint8."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)

    def close(self) -> None:
        """Give them back; a remaining view keeps its part."""
        os.close(self.descriptor)


class SharedLink(EmulatedLink):
    """A way whose rate the movers of two processes share.

    Args:
        bytes_per_s: its bandwidth.
        latency_s: of every transfer.
        descriptor: of the link in the other process; a new one if not given.
    """

    def __init__(
        self, bytes_per_s: float, latency_s: float = 0.0, descriptor: int | None = None
    ) -> None:
        super().__init__(bytes_per_s, latency_s)
        if descriptor is None:
            descriptor = os.memfd_create("shoal-link")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)

    def book(self, nbytes: int, asked_at: float | None = None) -> float:
        """The moment (``time.perf_counter``, one clock for all) at which it is through."""
        with self._lock:
            # Threads are kept apart by the lock, processes by that of the file.
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                (free_at,) = struct.unpack_from("d", self._map)
                begin = max(time.perf_counter() if asked_at is None else asked_at, free_at)
                through: float = begin + self.latency_s + nbytes / self.bytes_per_s
                struct.pack_into("d", self._map, 0, through)
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
        return through
