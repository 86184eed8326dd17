"""Which links between ranks of this host carry nothing any more, as the kernel reports.

A link that disappears is no error to its users: bytes wait in the sender's socket and are
sent again and again, for a quarter of an hour, while every rank stands in the same collective and
none is behind. The table of sockets says which bytes were never acknowledged; the one that the
peer has says whose they are. A peer that is stopped acknowledges until its buffer is full, and
then its window is asked for, which is another timer: it is not the link's fault.

Source: Linux, Documentation/networking/proc_net_tcp.rst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_ESTABLISHED = "01"
_RETRANSMITS = "01"
_MOST_SHOWN = 4


class SilentLink(NamedTuple):
    """A direction between two ranks.

    Args:
        source: rank that sends.
        target: rank at which nothing arrives.
        nbytes: sent again and again, and never acknowledged.
    """

    source: int
    target: int
    nbytes: int


class _Socket(NamedTuple):
    local: str
    remote: str
    unacknowledged: int
    again: bool


def silent_links(pids: Mapping[int, int]) -> list[SilentLink]:
    """Directions between ranks in which bytes are sent again and never acknowledged.

    Args:
        pids: rank -> its process, on this host; in any network namespace.

    Returns:
        By rank; empty where all links work, and where the kernel does not report it.
    """
    tables = {rank: _sockets(pid) for rank, pid in pids.items()}
    owner = {(one.local, one.remote): rank for rank, table in tables.items() for one in table}
    numbers: dict[tuple[int, int], int] = {}
    for rank, table in tables.items():
        for one in table:
            peer = owner.get((one.remote, one.local))
            if one.again and one.unacknowledged and peer is not None:
                pair = (rank, peer)
                numbers[pair] = numbers.get(pair, 0) + one.unacknowledged
    return [SilentLink(*pair, nbytes) for pair, nbytes in sorted(numbers.items())]


def said(links: Sequence[SilentLink], silent_s: float, where: str) -> str:
    """What an error says of links that carry nothing.

    Args:
        links: at least one.
        silent_s: for how long.
        where: what waits for them, such as ``all_reduce of step 7``.
    """
    pairs = ", ".join(f"rank {one.source} -> rank {one.target}" for one in links[:_MOST_SHOWN])
    more = len(links) - _MOST_SHOWN
    return (
        f"{pairs}{f' and {more} more' if more > 0 else ''}: nothing arrived for {silent_s:.0f} s "
        f"in {where}; {sum(one.nbytes for one in links)} bytes are sent again and again and no end "
        "acknowledges them: look at the network between these ranks"
    )


def _sockets(pid: int) -> list[_Socket]:
    """The TCP connections of a process; none if it is gone."""
    proc = _PROC / str(pid)
    try:
        opened = {str(entry.readlink()) for entry in (proc / "fd").iterdir()}
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            if (proc / "net" / name).exists()
            for line in (proc / "net" / name).read_text().splitlines()[1:]
        ]
    except OSError:  # it has ended meanwhile, is another user's, or this is no Linux
        return []
    return [
        _Socket(line[1], line[2], int(line[4].partition(":")[0], 16), _again(line))
        for line in lines
        if line[3] == _ESTABLISHED and f"socket:[{line[9]}]" in opened
    ]


def _again(line: Sequence[str]) -> bool:
    """The kernel waits to send again, and has done so at least once."""
    return line[5].partition(":")[0] == _RETRANSMITS and int(line[6], 16) > 0
