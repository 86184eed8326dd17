"""Reading large pieces of files ahead of who uses them, past the page cache where that is possible.

A checkpoint is read once, so copies of it in the page cache are of no use, and making them costs as
much as the disk. A few threads read into a ring of aligned buffers, so that the disk goes on while
what it delivered is checked, copied and sent.

Source: Wan et al., ByteCheckpoint, 2024, section 4.2 (reading, deserialising, copying overlap).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.source import host_memory
from shoal.checkpoint.storage import LocalFolder
from shoal.memory.tiers.disk import SECTOR

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.storage import Folder

# So many reads are under way at once: enough for a disk's full rate; of an object store each
# takes its time, however many there are.
_THREADS = 2
_THREADS_ELSEWHERE = 8
# Below this much, an open file of its own costs more than it gains.
_DIRECT_BYTES = 2**20


class ByteRange(NamedTuple):
    """Bytes of a file.

    Args:
        start: the first.
        stop: one past the last.
    """

    file: str
    start: int
    stop: int


@contextlib.contextmanager
def bytes_in_turn(
    folder: Folder,
    ranges: Sequence[ByteRange],
    look: Callable[[int, Tensor], None] | None = None,
    *,
    pinned: bool = False,
) -> Iterator[Iterator[Tensor | OSError]]:
    """Read ranges of files, ahead of the one that is used.

    Args:
        folder: of the files.
        ranges: in the order in which they are used.
        look: if given, called with the number of a range and its bytes, in the thread that read
            them.
        pinned: read into memory from which devices copy.

    Yields:
        The bytes of each range, uint8, valid until the next request; or the reason why they cannot
        be read.
    """
    local = _Local(folder.path) if isinstance(folder, LocalFolder) else None
    longest = max((one.stop - one.start for one in ranges), default=0)
    buffers: deque[Tensor] = deque()
    threads = _THREADS if local is not None else _THREADS_ELSEWHERE
    # One more than are read: what is used is not read into.
    ahead = threads + 1
    if local is not None and ranges:
        count = min(ahead, len(ranges))
        buffers.extend(host_memory(longest + 2 * SECTOR, pinned=pinned) for _ in range(count))

    def read(number: int, buffer: Tensor | None) -> Tensor:
        import torch

        one = ranges[number]
        if local is not None:
            assert buffer is not None
            data = local.read(one, buffer)
        else:
            data = torch.from_numpy(folder.read(one.file, one.start, one.stop))
        if look is not None:
            look(number, data)
        return data

    def run(pool: ThreadPoolExecutor) -> Iterator[Tensor | OSError]:
        waiting: deque[tuple[Future[Tensor], Tensor | None]] = deque()
        upcoming = iter(range(len(ranges)))

        def start() -> None:
            number = next(upcoming, None)
            if number is not None:
                buffer = buffers.popleft() if local is not None else None
                waiting.append((pool.submit(read, number, buffer), buffer))

        for _ in range(ahead):
            start()
        while waiting:
            future, buffer = waiting.popleft()
            try:
                yield future.result()
            except OSError as cause:
                yield cause
            if buffer is not None:
                buffers.append(buffer)
            start()

    with contextlib.ExitStack() as held:
        if local is not None:
            held.callback(local.close)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")
        held.callback(pool.shutdown, cancel_futures=True)
        yield run(pool)


class _Local:
    """Files of this host, open as long as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fds: dict[str, tuple[int, bool]] = {}
        self._lock = threading.Lock()

    def read(self, one: ByteRange, buffer: Tensor) -> Tensor:
        """The bytes of a range, somewhere in ``buffer``."""
        fd, direct = self._open(one.file)
        low = one.start // SECTOR * SECTOR
        high = -(-one.stop // SECTOR) * SECTOR
        view = memoryview(buffer.numpy())[: high - low]  # type: ignore[arg-type]
        try:
            self._fill(fd, view, low, one)
        except OSError as cause:
            if not direct or cause.errno != errno.EINVAL:
                raise
            # Opened, but not meant: some stacked file systems.
            self._fill(self._open(one.file, direct=False)[0], view, low, one)
        return buffer[one.start - low : one.stop - low]

    def _fill(self, fd: int, view: memoryview, at: int, one: ByteRange) -> None:
        done = 0
        while at + done < one.stop:
            got = os.preadv(fd, [view[done:]], at + done)
            if not got:
                raise OSError(errno.EIO, f"ends at byte {at + done}", str(self._path / one.file))
            done += got

    def _open(self, file: str, *, direct: bool = True) -> tuple[int, bool]:
        with self._lock:
            known = self._fds.get(file)
            if known is not None and (direct or not known[1]):
                return known
            path = self._path / file
            fd = -1
            if direct and path.stat().st_size >= _DIRECT_BYTES and hasattr(os, "O_DIRECT"):
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
                except OSError as cause:
                    if cause.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
            past = fd >= 0
            if not past:
                fd = os.open(path, os.O_RDONLY)
            if known is not None:
                self._fds[f"{file} direct"] = known  # another thread may be reading from it
            self._fds[file] = fd, past
            return fd, past

    def close(self) -> None:
        """Close all files."""
        for fd, _ in self._fds.values():
            os.close(fd)
        self._fds.clear()
