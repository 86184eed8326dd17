"""Messages between the ranks of one host through memory that they share.

Gloo hands a message to a thread of its own, which competes with the computing thread for the
core and holds locks that this one needs. Here every ordered pair of ranks has a ring of bytes in
one mapped file: the sender copies a message in behind its header and goes on, the receiver
copies it out when it waits. Only the two computing threads take part.

A message larger than half a ring, or for which there is no room now, goes by Gloo; its header
still goes through the ring, so that the receiver knows which way to look, and the messages of a
pair keep their order.

Source: the eager and rendezvous protocols of MPI, for instance Buntinas, Mercier and Gropp,
Design and Evaluation of Nemesis, 2006.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.parallel.comm.shared_memory import NAP_S, SPINS, join_file, runs

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_RING = 4 * 2**20  # bytes of the ring of a pair
_LINE = 64  # bytes of a cache line: the two counters of a ring must not share one
_HEADER = 4  # numbers before a message: its key, its bytes, its way, nothing
_HERE, _GLOO = 0, 1  # ways of a message
_SHUT = -1  # a ring's first counter, if there was no memory for it

# Starts what Gloo does for one message.
_Start = Callable[[], Any]


class Mailboxes:
    """The rings of all pairs of ranks, open in every rank of the host; see :meth:`join`.

    Messages of one key from one rank arrive in the order in which they were sent.

    Args:
        file: the mapped file; it stays open.
        timeout_s: a message that takes longer fails.
    """

    def __init__(self, file: int, rank: int, world: int, timeout_s: float) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._file = file
        self._map = mmap.mmap(file, _size(world))
        # A line of each rank with its process number; then of each pair, by sender and
        # receiver, a line with the bytes ever written and one with the bytes ever read.
        lines = np.frombuffer(self._map, np.int64, (world + 2 * world * world) * _LINE // 8)
        lines = lines.reshape(-1, _LINE // 8)
        self._processes = lines[:world, 0]
        pairs = lines[world:, 0].reshape(world, world, 2)
        self._written, self._read = pairs[..., 0], pairs[..., 1]
        rings = np.frombuffer(self._map, np.uint8, world * world * _RING, _header(world))
        self._rings = rings.reshape(world, world, _RING)
        self._heads = self._rings.view(np.int64)
        self._open = [False] * world
        # By peer: headers for which there was no room yet.
        self._behind: list[deque[tuple[int, int]]] = [deque() for _ in range(world)]
        # By peer and key: receives whose message has not come, and messages not asked for.
        self._expected: dict[tuple[int, int], deque[_Receive]] = {}
        self._early: dict[tuple[int, int], deque[np.ndarray[Any, Any] | None]] = {}
        self._lock = threading.Lock()
        self._processes[rank] = os.getpid()

    @classmethod
    def join(
        cls, rank: int, world: int, timeout_s: float, group: ProcessGroup | None = None
    ) -> Mailboxes | None:
        """Map one file in all ranks; None, everywhere, where that cannot be.

        See :meth:`~shoal.parallel.comm.shared_memory.SharedMemory.join`. Memory of a ring is taken
        when its first message is sent.
        """
        file = join_file(rank, world, size=_size(world), reserve=_header(world), group=group)
        return None if file is None else cls(file, rank, world, timeout_s)

    def send(self, x: Tensor, target: int, key: int, by_gloo: _Start) -> _Send:
        """Start sending a contiguous tensor to rank ``target``.

        Args:
            x: what to send.
            target: to whom.
            key: names a stream of messages; non-negative.
            by_gloo: starts sending the same by Gloo.

        Raises:
            RuntimeError: the tensor is not contiguous.
        """
        import torch

        data = x.view(-1).view(torch.uint8).numpy()
        with self._lock:
            self._flush()
            if self._is_open(target):
                if not self._behind[target] and self._put(target, key, data):
                    return _Send(self, target, None)
                self._behind[target].append((key, len(data)))
                self._flush()
            return _Send(self, target, by_gloo())

    def receive(self, out: Tensor, source: int, key: int, by_gloo: _Start) -> _Receive:
        """Start receiving into a contiguous tensor from rank ``source``.

        Args:
            out: where to.
            source: from whom.
            key: as the sender's.
            by_gloo: starts receiving the same by Gloo.

        Raises:
            RuntimeError: the tensor is not contiguous, or the message has another size.
        """
        import torch

        wanted = _Receive(self, source, out.view(-1).view(torch.uint8).numpy(), by_gloo)
        with self._lock:
            self._flush()
            early = self._early.get((source, key))
            if early:
                wanted.take(early.popleft())
            else:
                self._expected.setdefault((source, key), deque()).append(wanted)
                self._take_all(source)
        return wanted

    def progress(self, source: int | None = None) -> None:
        """Write what waits to be written, and read what ``source`` has sent."""
        with self._lock:
            self._flush()
            if source is not None:
                self._take_all(source)

    def wait_for(self, done: Callable[[], bool], peer: int, source: int | None = None) -> None:
        """Return when ``done()``; meanwhile messages go on.

        Raises:
            RuntimeError: ``peer`` is gone, or did not come in time.
        """
        for _ in range(SPINS // 4):  # a look here takes longer than one at a counter
            if done():
                return
            self.progress(source)
        begin = looked = time.monotonic()
        while not done():
            time.sleep(NAP_S)
            self.progress(source)
            now = time.monotonic()
            if now - looked > 0.1:
                looked = now
                if not runs(int(self._processes[peer])):
                    self.progress(source)  # what it sent before its end counts
                    if not done():
                        raise RuntimeError(f"rank {peer} has ended")
                if now - begin > self.timeout_s and not done():
                    raise RuntimeError(f"rank {peer} did not come in {self.timeout_s:g} s")

    def is_behind(self, target: int) -> bool:
        """Whether headers still wait for room in the ring to ``target``."""
        return bool(self._behind[target])

    def _is_open(self, target: int) -> bool:
        """Take the memory of the ring to ``target``, once."""
        if not self._open[target]:
            if int(self._written[self.rank, target]) == _SHUT:
                return False
            place = _header(self.world) + (self.rank * self.world + target) * _RING
            try:
                # Reserved now: a full file system would otherwise kill the rank at first touch.
                os.posix_fallocate(self._file, place, _RING)
            except OSError:
                self._written[self.rank, target] = _SHUT
                return False
            self._open[target] = True
        return True

    def _flush(self) -> None:
        """Write headers that wait, as far as there is room."""
        for target, behind in enumerate(self._behind):
            while behind and self._put_header(target, *behind[0], _GLOO, _HEADER * 8):
                behind.popleft()

    def _put(self, target: int, key: int, data: np.ndarray[Any, Any]) -> bool:
        """Write a message, if it is small and there is room."""
        need = _HEADER * 8 + _padded(len(data))
        if need > _RING // 2:
            return False
        return self._put_header(target, key, len(data), _HERE, need, data)

    def _put_header(
        self,
        target: int,
        key: int,
        nbytes: int,
        way: int,
        need: int,
        data: np.ndarray[Any, Any] | None = None,
    ) -> bool:
        written = int(self._written[self.rank, target])
        at = written % _RING
        free = _RING - written + int(self._read[self.rank, target])
        # A message lies in one piece: where the ring ends too soon, it begins anew.
        skip = _RING - at if need > _RING - at else 0
        if skip + need > free:
            return False
        if skip:
            self._heads[self.rank, target, at // 8] = -1
            at = 0
        first = at // 8
        self._heads[self.rank, target, first : first + 3] = (key, nbytes, way)
        if data is not None:
            start = at + _HEADER * 8
            self._rings[self.rank, target, start : start + nbytes] = data
        # x86 keeps the order of stores: a reader of the count sees what was written before.
        self._written[self.rank, target] = written + skip + need
        return True

    def _take_all(self, source: int) -> None:
        """Read every message that ``source`` has written."""
        ring, numbers = self._rings[source, self.rank], self._heads[source, self.rank]
        written, read = int(self._written[source, self.rank]), int(self._read[source, self.rank])
        if written == _SHUT:
            for (rank, _), all_of_key in self._expected.items():
                while rank == source and all_of_key:
                    all_of_key.popleft().take(None)
        while read < written:
            at = read % _RING
            key, nbytes, way = (int(n) for n in numbers[at // 8 : at // 8 + 3])
            if key < 0:
                read += _RING - at
                continue
            start = at + _HEADER * 8
            data = ring[start : start + nbytes] if way == _HERE else None
            expected = self._expected.get((source, key))
            if expected:
                expected.popleft().take(data)
            else:
                kept = None if data is None else data.copy()
                self._early.setdefault((source, key), deque()).append(kept)
            read += _HEADER * 8 + (_padded(nbytes) if way == _HERE else 0)
            self._read[source, self.rank] = read


class _Send:
    """A message on its way; what was sent must not change before :meth:`wait` returns."""

    def __init__(self, boxes: Mailboxes, target: int, gloo: Any) -> None:
        self._boxes = boxes
        self._target = target
        self._gloo = gloo

    def wait(self) -> None:
        """Return when the tensor may change."""
        if self._gloo is not None:
            boxes, target = self._boxes, self._target
            boxes.wait_for(lambda: not boxes.is_behind(target), target)
            self._gloo.wait()


class _Receive:
    """A message that is awaited."""

    def __init__(
        self, boxes: Mailboxes, source: int, out: np.ndarray[Any, Any], by_gloo: _Start
    ) -> None:
        self._boxes = boxes
        self._source = source
        self._out = out
        self._by_gloo = by_gloo
        self._gloo: Any = None
        self._come = False

    def take(self, data: np.ndarray[Any, Any] | None) -> None:
        """The message has come; None says that it comes by Gloo."""
        if data is None:
            self._gloo = self._by_gloo()
        elif len(data) != len(self._out):
            raise RuntimeError(
                f"rank {self._source} sent a message of {len(data)} bytes, "
                f"{len(self._out)} were awaited"
            )
        else:
            self._out[:] = data
        self._come = True

    def wait(self) -> None:
        """Return when the message is in its tensor."""
        boxes, source = self._boxes, self._source
        boxes.wait_for(lambda: self._come, source, source)
        if self._gloo is not None:
            self._gloo.wait()


def _padded(nbytes: int) -> int:
    """Bytes that a message takes: headers begin where a number may."""
    return -(-nbytes // 32) * 32


def _header(world: int) -> int:
    nbytes = (world + 2 * world * world) * _LINE
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(world: int) -> int:
    return _header(world) + world * world * _RING
