"""Writing a large file past the page cache.

A checkpoint is read again hours later or never, so copies of it in memory are of no use, and
making them costs the processor more than the disk. Bytes whose place in memory and
in the file is aligned go straight to the disk (``O_DIRECT``); all others through the page cache,
and so does everything where the file system has no such way.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.memory.tiers.disk import SECTOR

if TYPE_CHECKING:
    import numpy as np

# Linux writes at most this much in one call.
_CALL_BYTES = 2**30
# Below this much, one more open file costs more than it gains.
_DIRECT_BYTES = 2**20


class DiskSink:
    """A new file of known size.

    Raises:
        OSError: the file system refuses.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        self._plain: int | None = os.open(path, flags, 0o644)
        self._direct: int | None = None
        if size >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            except OSError as cause:
                if cause.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    self.abandon()
                    raise

    def write(self, at: int, data: np.ndarray) -> None:
        if self._direct is not None and at % SECTOR == 0 and data.ctypes.data % SECTOR == 0:
            whole = len(data) // SECTOR * SECTOR
            try:
                _write_all(self._direct, data[:whole].data, at)
            except OSError as cause:
                if cause.errno != errno.EINVAL:
                    raise
                os.close(self._direct)  # opened, but not meant: some stacked file systems
                self._direct = None
                whole = 0
            at, data = at + whole, data[whole:]
        assert self._plain is not None
        _write_all(self._plain, data.data, at)

    def finish(self) -> None:
        assert self._plain is not None
        os.fsync(self._plain)
        self._close()

    def abandon(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        for fd in (self._plain, self._direct):
            if fd is not None:
                os.close(fd)
        self._plain = self._direct = None


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while len(view):
        done = os.pwrite(fd, view[:_CALL_BYTES], at)
        view, at = view[done:], at + done
