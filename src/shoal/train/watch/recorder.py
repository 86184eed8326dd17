"""A flight recorder of one rank: a ring of fixed records in a memory-mapped file.

Writing is a few stores into memory: nothing is synchronised, nothing is flushed, and what was
written survives the death of the process. Every operation has four times, so that a reader
can distinguish being late from being kept waiting:

- ``enter``: the call began; the rank has arrived.
- ``issued``: the call returned. Between the two the rank was blocked if the operation works
  at once, as a barrier does.
- ``waited``: a wait for the result began.
- ``left``: the result was there.

Times are nanoseconds of the host's monotonic clock, which all processes of a host share; what
lies between the clocks of two hosts is estimated by the reader (:mod:`.evidence`).

Source: the flight recorder of PyTorch, 2024, and Jiang et al., MegaScale, 2024 (section 5,
events written without synchronising).
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RankError, require
from shoal.core.files import write_atomic

_MAGIC = b"SHOALFR1"
# magic, rank, world, capacity, records begun, bytes, last beat, length of the names
_HEADER = struct.Struct("<8siiqqqqq")
_NAMES_AT = 64
_NAMES_SIZE = 1 << 16
_RECORDS_AT = _NAMES_AT + _NAMES_SIZE
_RECORD = struct.Struct("<qqqqqIiHHHh")
_TIME = struct.Struct("<q")
_COUNT_AT = struct.calcsize("<8siiq")
_BYTES_AT = _COUNT_AT + 8
_BEAT_AT = _COUNT_AT + 16
_LENGTH_AT = _COUNT_AT + 24

RECORD = np.dtype(
    [
        ("enter", "<i8"),
        ("issued", "<i8"),
        ("waited", "<i8"),
        ("left", "<i8"),
        ("nbytes", "<i8"),
        ("seq", "<u4"),
        ("step", "<i4"),
        ("comm", "<u2"),
        ("op", "<u2"),
        ("tag", "<u2"),
        ("peer", "<i2"),
    ]
)
"""One record; ``comm``, ``op`` and ``tag`` number the names of the flight, 0 is no name.

``seq`` counts the collectives of a communicator, or the messages of one direction between two
of its ranks with one tag; ``peer`` is a rank of the job, -1 of a collective.
"""

COMPUTE = "compute"
"""The op of spans that are no communication; their tag says what they are."""


class Recorder:
    """Writes the flight of one rank.

    Args:
        path: file to write; created here.
        capacity: records kept; older ones are overwritten.
        host: name of the host; ranks with one name share a clock.
        beat_s: seconds between beats of a thread that shows that the process runs; 0 for none.
        clock: nanoseconds; the host's monotonic clock if not given.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        world: int,
        *,
        capacity: int = 8192,
        host: str = "",
        beat_s: float = 0.0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        require(capacity >= 16, "watch.events", capacity, expected="at least 16 records")
        self.path = path
        self.rank = rank
        self.world = world
        self.capacity = capacity
        self.clock = clock
        self.step = -1
        blank = bytearray(_RECORDS_AT + capacity * _RECORD.size)
        _HEADER.pack_into(blank, 0, _MAGIC, rank, world, capacity, 0, 0, clock(), 0)
        write_atomic(path, bytes(blank))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._count = 0
        self._bytes = 0
        self._names: dict[str, int] = {}
        self._names_end = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.name(f"host:{host}")
        if beat_s > 0:
            threading.Thread(target=self._beats, args=(beat_s,), daemon=True).start()

    def name(self, text: str) -> int:
        """The number of a name, from 1; 0 where there is no room for more."""
        value = self._names.get(text)
        if value is not None:
            return value
        with self._lock:
            raw = text.encode()[:255]
            if self._names_end + 1 + len(raw) > _NAMES_SIZE or len(self._names) >= 65535:
                return 0
            at = _NAMES_AT + self._names_end
            self._map[at] = len(raw)
            self._map[at + 1 : at + 1 + len(raw)] = raw
            self._names_end += 1 + len(raw)
            # The length last: a reader never sees half a name.
            _TIME.pack_into(self._map, _LENGTH_AT, self._names_end)
            return self._names.setdefault(text, len(self._names) + 1)

    def enter(self, comm: int, op: int, tag: int, *, seq: int, nbytes: int, peer: int = -1) -> int:
        """The rank enters an operation; returns its number."""
        with self._lock:
            number = self._count
            self._count = number + 1
            self._bytes += nbytes
            at = _RECORDS_AT + number % self.capacity * _RECORD.size
            _RECORD.pack_into(
                self._map,
                at,
                self.clock(),
                0,
                0,
                0,
                nbytes,
                seq & 0xFFFFFFFF,
                self.step,
                comm,
                op,
                tag,
                peer,
            )
            _TIME.pack_into(self._map, _COUNT_AT, self._count)
            _TIME.pack_into(self._map, _BYTES_AT, self._bytes)
        return number

    def issued(self, number: int) -> None:
        """The call of operation ``number`` has returned."""
        self._stamp(number, 8)

    def waited(self, number: int) -> None:
        """The rank waits for operation ``number`` from now on."""
        self._stamp(number, 16)

    def left(self, number: int) -> None:
        """Operation ``number`` has its result."""
        self._stamp(number, 24)

    def _stamp(self, number: int, place: int) -> None:
        if number > self._count - self.capacity - 1:
            at = _RECORDS_AT + number % self.capacity * _RECORD.size + place
            _TIME.pack_into(self._map, at, self.clock())

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Record how long the rank does ``what``, no communication."""
        number = self.enter(0, self.name(COMPUTE), self.name(what), seq=0, nbytes=0)
        self.issued(number)
        try:
            yield
        finally:
            self.left(number)

    def beat(self) -> None:
        """The process runs."""
        _TIME.pack_into(self._map, _BEAT_AT, self.clock())

    def close(self) -> None:
        """Stop beating; the file stays."""
        self._closed.set()

    def _beats(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            self.beat()


class Flight(NamedTuple):
    """What one rank recorded.

    Args:
        host: ranks with one name share a clock.
        names: number -> name; 0 is "".
        rows: records in the order in which they were entered, of type :data:`RECORD`.
        lost: older records that were overwritten.
        nbytes: bytes of all operations so far.
        beat: time of the last beat, ns.
    """

    rank: int
    world: int
    host: str
    names: tuple[str, ...]
    rows: NDArray[np.void]
    lost: int = 0
    nbytes: int = 0
    beat: int = 0


def read(path: Path) -> Flight | None:
    """The flight in a file, also while it is written; None where there is none.

    Raises:
        RankError: the file is no flight recorder's.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _RECORDS_AT or raw[:8] != _MAGIC:
        raise RankError(
            f"{path}: no flight recorder wrote this; remove it, or diagnose another run"
        )
    _, rank, world, capacity, count, nbytes, beat, length = _HEADER.unpack_from(raw)
    require(
        capacity >= 1 and len(raw) >= _RECORDS_AT + capacity * _RECORD.size,
        f"{path}: records",
        capacity,
        expected="as many as the file holds",
        hint="the file is cut short",
        error=RankError,
    )
    names, at = [""], _NAMES_AT
    while at < _NAMES_AT + min(length, _NAMES_SIZE):
        size = raw[at]
        names.append(raw[at + 1 : at + 1 + size].decode(errors="replace"))
        at += 1 + size
    rows = np.frombuffer(raw, RECORD, capacity, _RECORDS_AT)
    if count <= capacity:
        rows, lost = rows[:count], 0
    else:
        rows, lost = np.roll(rows, -(count % capacity)), count - capacity
    host = names[1].removeprefix("host:") if len(names) > 1 else ""
    return Flight(rank, world, host, tuple(names), rows, lost, nbytes, beat)
