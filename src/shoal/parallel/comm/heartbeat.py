"""Who is where: one small memory-mapped file per rank.

A rank writes its step, the number of its newest collective and whether it is inside
one; a supervisor, or a peer, reads it without asking the rank. A rank that hangs
outside of a collective while the others wait inside is the one to blame.

The age of a heartbeat is measured on the host's monotonic clock, which all processes of one boot of
a host share and which cannot be set. A heartbeat of another host, or of an earlier boot, has no
clock in common with the reader but the wall clock, and its age is as good as that. Who watches
ranks reads through :class:`BeatReader`, which compares no clocks at all.
"""

from __future__ import annotations

import hashlib
import mmap
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoal.core.files import write_atomic

# Step, collective, inside, ns of the wall clock, the name of the collective, what the monotonic
# clock belongs to, and its ns. Older runs wrote the first 32 or 48 bytes.
_LAYOUT = struct.Struct("<qqqq16s8sq")
_LEAST = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# A pause of a reader that is longer than this was none of the ranks' doing.
_LONGEST_S = 5.0


@dataclass(frozen=True)
class HeartbeatReading:
    """One reading of a heartbeat.

    Args:
        step: global step it works on; -1 before the first.
        collective: how many collectives it has entered.
        inside: it has entered that one and not left it.
        age_s: seconds since it last wrote; of :class:`BeatReader`, since a write was last read.
        op: name of that collective.
    """

    rank: int
    step: int
    collective: int
    inside: bool
    age_s: float
    op: str = ""


class Heartbeat:
    """The file of one rank.

    Args:
        path: file to write; created here.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._step = -1
        self._collective = 0
        self._op = b""
        self._boot = _boot()
        write_atomic(path, self._packed(inside=False))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    def step(self, step: int) -> None:
        """The rank works on ``step`` now."""
        self._step = step
        self._write(inside=False)

    def alive(self) -> None:
        """The rank makes progress in something long that is no step."""
        self._write(inside=False)

    def enter(self, op: str = "", *, counted: bool = True) -> None:
        """The rank enters its next collective, ``op``; ``counted`` if all ranks of the job do."""
        self._op = op.encode()
        self._collective += counted
        self._write(inside=True)

    def leave(self) -> None:
        """The rank has left the collective."""
        self._write(inside=False)

    def _write(self, *, inside: bool) -> None:
        self._map[:] = self._packed(inside=inside)

    def _packed(self, *, inside: bool) -> bytes:
        return _LAYOUT.pack(
            self._step,
            self._collective,
            inside,
            time.time_ns(),
            self._op,
            self._boot,
            time.monotonic_ns(),
        )

    @staticmethod
    def read(path: Path, rank: int) -> HeartbeatReading | None:
        """The newest beat of a rank, or None while it has none."""
        raw = _bytes_of(path)
        return None if raw is None else _parsed(raw, rank)


class RunningClock:
    """Monotonic seconds in which this process ran.

    A stopped process, a frozen container or a suspended host shows as one long pause between two
    readings. The ranks may have stood still as well, so a pause counts as ``longest_s`` at most.

    Args:
        longest_s: what the longest pause between two readings counts as.
        clock: seconds of a clock that is never set.
    """

    def __init__(
        self, longest_s: float = _LONGEST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._last = clock()
        self._seconds = 0.0

    def __call__(self) -> float:
        """Seconds since this clock was made."""
        now = self._clock()
        self._seconds += min(now - self._last, self._longest_s)
        self._last = now
        return self._seconds


class BeatReader:
    """Heartbeats whose age is the time since a reading found them changed.

    No clock of the ranks is compared with one of the reader's, so clocks that are set, or that
    differ, change nothing. Read often: a change counts from the reading that finds it.

    Args:
        clock: seconds of the reader.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or RunningClock()
        self._changed: dict[int, tuple[bytes, float]] = {}

    def read(self, path: Path, rank: int) -> HeartbeatReading | None:
        """The newest beat of a rank, or None while it has none."""
        raw, now = _bytes_of(path), self.clock()
        if raw is None:
            return None
        before = self._changed.get(rank)
        if before is None or before[0] != raw:
            before = self._changed[rank] = (raw, now)
        return replace(_parsed(raw, rank), age_s=now - before[1])


@cache
def _boot() -> bytes:
    """What the monotonic clock belongs to: this boot of this host, as 8 bytes."""
    try:
        name = _BOOT_ID.read_text()
    except OSError:  # not Linux
        name = socket.gethostname()
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _bytes_of(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    return raw if len(raw) >= _LEAST else None


def _parsed(raw: bytes, rank: int) -> HeartbeatReading:
    step, collective, inside, wall, op, boot, monotonic = _LAYOUT.unpack(
        raw.ljust(_LAYOUT.size, b"\0")
    )
    age_ns = time.monotonic_ns() - monotonic if boot == _boot() else time.time_ns() - wall
    name = op.rstrip(b"\0").decode()
    return HeartbeatReading(rank, step, collective, bool(inside), max(0.0, age_ns / 1e9), name)


def blame(beats: list[HeartbeatReading]) -> HeartbeatReading:
    """The rank that the others wait for: behind in collectives, else outside, else silent."""
    return min(beats, key=lambda beat: (beat.collective, beat.inside, -beat.age_s))
