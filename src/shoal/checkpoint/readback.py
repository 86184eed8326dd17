"""Reading what was just written from the disk again, and comparing it with its checksums.

Nothing of it is wanted, so nothing is mapped and nothing enters the page cache: chunks pass through
a small buffer, in the order in which they lie in the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.checksum import crc32c
from shoal.checkpoint.source import CHUNK_BYTES, host_memory
from shoal.memory.tiers.disk import SECTOR

if TYPE_CHECKING:
    import numpy as np

    from shoal.checkpoint.shards import StoredPiece


def chunks_of(path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """A file from its first byte to its last; a chunk is invalid after the next is requested.

    Raises:
        OSError: it cannot be read.
    """
    memory = host_memory(CHUNK_BYTES).numpy()
    fd = _open(path)
    try:
        at = 0
        while True:
            try:
                got = os.preadv(fd, [memory.data], at)
            except OSError as cause:
                if cause.errno != errno.EINVAL or at:
                    raise
                os.close(fd)  # opened, but not meant: some stacked file systems
                fd = os.open(path, os.O_RDONLY)
                got = os.preadv(fd, [memory.data], at)
            if got:
                yield at, memory[:got]
            at += got
            if got == 0 or got % SECTOR:  # past the cache only the end is no whole sector
                break
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDONLY | direct)
    except OSError as cause:
        if not direct or cause.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, os.O_RDONLY)


def unlike(
    path: Path, pieces: list[tuple[int, int, str, StoredPiece]]
) -> Iterator[tuple[str, StoredPiece]]:
    """Tensor and piece of all in this file that are not what was written.

    Args:
        path: the file.
        pieces: first byte, end, tensor and entry of each, by where they begin.
    """
    waiting = iter(sorted(pieces, key=lambda piece: piece[:2]))
    piece = next(waiting, None)
    checksum = 0
    for at, data in chunks_of(path):
        end = at + len(data)
        while piece is not None and piece[0] < end:
            start, stop, name, entry = piece
            low, high = max(start, at), min(stop, end)
            checksum = crc32c(data[low - at : high - at], checksum)
            if stop > end:
                break
            if checksum != entry.crc32c:
                yield name, entry
            piece, checksum = next(waiting, None), 0
    if piece is not None and piece[0] < piece[1]:  # the file ends before it does
        yield piece[2], piece[3]
