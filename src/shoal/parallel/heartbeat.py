"""Who is where: one small memory-mapped file per rank.

A rank writes its step, the number of its newest collective and whether it is inside
one; a supervisor, or a peer, reads it without asking the rank. A rank that hangs
outside of a collective while the others wait inside is the one to blame.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.core.files import write_atomic

__all__ = ["Beat", "Heartbeat", "blame"]

# Step, collective, inside, nanoseconds, and the name of the collective.
_LAYOUT = struct.Struct("<qqqq16s")
# Bytes in runs from before there were names.
_UNNAMED = 32


@dataclass(frozen=True)
class Beat:
    """One reading of a heartbeat.

    Args:
        rank: whose.
        step: global step it works on; -1 before the first.
        collective: how many collectives it has entered.
        inside: it has entered that one and not left it.
        age_s: seconds since it last wrote.
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
        rank: whose it is.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        write_atomic(path, _LAYOUT.pack(-1, 0, 0, time.time_ns(), b""))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._step = -1
        self._collective = 0
        self._op = b""

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
        now = time.time_ns()
        _LAYOUT.pack_into(self._map, 0, self._step, self._collective, inside, now, self._op)

    @staticmethod
    def read(path: Path, rank: int) -> Beat | None:
        """The newest beat of a rank, or None while it has none."""
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(raw) < _UNNAMED:
            return None
        step, collective, inside, stamp, op = _LAYOUT.unpack(raw.ljust(_LAYOUT.size, b"\0"))
        age = max(0.0, (time.time_ns() - stamp) / 1e9)
        return Beat(rank, step, collective, bool(inside), age, op.rstrip(b"\0").decode())


def blame(beats: list[Beat]) -> Beat:
    """The rank that the others wait for: behind in collectives, else outside, else silent."""
    return min(beats, key=lambda beat: (beat.collective, beat.inside, -beat.age_s))
