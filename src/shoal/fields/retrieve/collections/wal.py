"""A log of changes that only grows: what was acknowledged is there after a crash."""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from shoal.core.errors import StoreError
from shoal.core.files import fsync_dir

# Bytes of a record, their CRC-32, and that of both, so that a wrong length is not believed.
_HEAD, _FIRST = struct.Struct("<III"), struct.Struct("<II")
MOST_BYTES = 1 << 30
"""Of a record."""


def read_log(path: Path) -> tuple[list[bytes], int]:
    """The records of a log, and where the last whole one ends.

    A record at the end that was not written whole was never acknowledged, and is left out.

    Args:
        path: of the log.

    Raises:
        StoreError: it cannot be read, or a record before the end is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as cause:
        raise StoreError(f"{path}: cannot be read: {cause}") from cause
    records, at = [], 0
    while at + _HEAD.size <= len(data):
        size, crc, check = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + size
        right = zlib.crc32(data[at : at + _FIRST.size]) == check
        if right and end > len(data):
            break  # torn
        record = data[at + _HEAD.size : end]
        if not right or zlib.crc32(record) != crc:
            # Room that was never filled, or a last record of which not all has come.
            if not any(data[at:]) or (right and end == len(data)):
                break
            raise StoreError(
                f"{path}: the record at byte {at} is damaged, and others follow it; restore the "
                "collection from a snapshot"
            )
        records.append(record)
        at = end
    return records, at


class WriteAheadLog:
    """A log that is open for writing.

    Args:
        path: of the log; made where there is none.
        end: where its last whole record ends; what follows is cut off.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path, end: int = 0) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._file, end)
            fsync_dir(path.parent)
        except OSError as cause:
            raise StoreError(f"{path}: cannot be written: {cause}") from cause
        self.num_bytes = end

    def append(self, record: bytes) -> None:
        """Write a record; it is on the disk when this returns.

        Raises:
            StoreError: it is empty or too large, or the disk is full; the log is as before.
        """
        if not 0 < len(record) <= MOST_BYTES:
            raise StoreError(f"{self.path}: a record of {len(record)} bytes; at most {MOST_BYTES}")
        data = memoryview(_head(record) + record)
        at = self.num_bytes
        try:
            while data:
                written = os.pwrite(self._file, data, at)
                data, at = data[written:], at + written
            os.fdatasync(self._file)
        except OSError as cause:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)
            raise StoreError(f"{self.path}: cannot be written: {cause}") from cause
        self.num_bytes = at

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


def _head(record: bytes) -> bytes:
    first = _FIRST.pack(len(record), zlib.crc32(record))
    return first + struct.pack("<I", zlib.crc32(first))
