"""Threads as ranks on links that take time: data really moves, on a virtual clock.

Every rank has a clock. ``compute`` moves it on; ``wait`` moves it to the time when what it
waited for was there. A message starts when its sender's clock, what it depends on, and the
links on its way allow; it keeps every link of its way for bytes / bandwidth and arrives one
latency a link after its last byte has left (cut-through). Collectives are the messages of
their ring algorithm; they go on while their ranks compute, as on a network card.

Times do not depend on how the threads run: a message is put on the links only when every
rank waits, the one that was ready first first, so nothing that comes later could have been
before it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from shoal.claims.lab.thread_ranks import PendingCollective, PendingMessage, ThreadComm, ThreadWorld
from shoal.core.errors import require
from shoal.core.meter import Meter
from shoal.parallel.protocols import Pending

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between ranks; an :class:`~shoal.ir.LinkModel`.

    Args:
        latency_s: of one link.
        bandwidth: byte/s of one link in one direction.
        shape: ``mesh``, a link between every two ranks; or ``ring``, links between neighbours
            alone, and a message over distance j keeps the j links of the shorter way, upwards
            where both are equal.
        duplex: ``full``, both directions at once; ``half``, one at a time.
        ranks_per_node: ranks of one node, neighbours by number; all on one if not given.
        node_latency_s: of a link between nodes; as inside if not given.
        node_bandwidth: byte/s of a link between nodes; as inside if not given.
    """

    latency_s: float
    bandwidth: float
    shape: Literal["mesh", "ring"] = "mesh"
    duplex: Literal["full", "half"] = "full"
    ranks_per_node: int | None = None
    node_latency_s: float | None = None
    node_bandwidth: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "node_latency_s"):
            value = getattr(self, name)
            require(
                value is None or value >= 0, f"links.{name}", value, expected="seconds, 0 or more"
            )
        for name in ("bandwidth", "node_bandwidth"):
            value = getattr(self, name)
            require(value is None or value > 0, f"links.{name}", value, expected="byte/s above 0")
        require(self.shape in ("mesh", "ring"), "links.shape", self.shape, expected="mesh or ring")
        require(self.duplex in ("full", "half"), "links.duplex", self.duplex, expected="full, half")

    def way(self, source: int, target: int, world: int) -> list[tuple[int, int]]:
        """The links from rank to rank among ``world``, each (from, to)."""
        if self.shape == "mesh":
            return [(source, target)]
        up = (target - source) % world
        step, hops = (1, up) if up <= world - up else (-1, world - up)
        places = [(source + step * i) % world for i in range(hops + 1)]
        return list(itertools.pairwise(places))

    def latency(self, link: tuple[int, int]) -> float:
        """Seconds until the first byte is over."""
        if self.node_latency_s is not None and self._crosses(link):
            return self.node_latency_s
        return self.latency_s

    def rate(self, link: tuple[int, int]) -> float:
        """Byte/s over the link."""
        if self.node_bandwidth is not None and self._crosses(link):
            return self.node_bandwidth
        return self.bandwidth

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Seconds from rank to rank over one link; 0 within a rank."""
        if source == target:
            return 0.0
        return self.latency((source, target)) + nbytes / self.rate((source, target))

    def _crosses(self, link: tuple[int, int]) -> bool:
        size = self.ranks_per_node
        return size is not None and link[0] // size != link[1] // size


def run_linked(
    world: int,
    function: Callable[[LinkComm], _T],
    links: Links,
    *,
    meter: Meter | None = None,
    timeout_s: float = 60.0,
) -> list[_T]:
    """As :func:`~shoal.claims.lab.thread_ranks.run_ranks`, on links that take time.

    Args:
        world: number of ranks.
        function: what a rank does; ``comm.now`` at its end is when it had done it.
        links: the links between the ranks.
        meter: shared by the ranks; without one each rank counts for itself.
        timeout_s: real seconds after which a rank that waits fails.

    Returns:
        What each rank returned, in rank order.
    """
    return _LinkWorld(world, timeout_s, links).run(
        lambda shared, rank: function(
            LinkComm.whole(shared, rank, meter or Meter(), links.ranks_per_node)
        )
    )


@dataclass
class _Message:
    """Bytes from rank to rank of the job, and what happens when they are there."""

    source: int
    target: int
    nbytes: float
    left: float | None = None
    arrived: float | None = None
    then: Callable[[_Message], None] | None = None


class _LinkWorld(ThreadWorld):
    """Threads with clocks, and messages that wait for their links."""

    def __init__(self, size: int, timeout_s: float, links: Links) -> None:
        super().__init__(size, timeout_s)
        self.links = links
        self.clocks = [0.0] * size
        self._free: dict[tuple[int, int], float] = {}
        # (ready, sender, number of the sender's message): threads have no say in the order.
        self._queue: list[tuple[float, int, int, _Message]] = []
        self._numbers = [0] * size

    def issue(self, message: _Message, ready: float, number: int) -> None:
        """A message may go from time ``ready`` on; the lock is held."""
        heapq.heappush(self._queue, (ready, message.source, number, message))

    def number(self, rank: int) -> int:
        """Number of the next message of ``rank``, in the order of its program."""
        self._numbers[rank] += 1
        return self._numbers[rank]

    def stuck(self) -> bool:
        """Put the message on the links that was ready first."""
        if not self._queue:
            return False
        ready, _, _, message = heapq.heappop(self._queue)
        way = self.links.way(message.source, message.target, self.size)
        keys = [self._key(link) for link in way]
        start = max([ready, *(self._free.get(key, 0.0) for key in keys)])
        left = start + message.nbytes / min(self.links.rate(link) for link in way)
        for key in keys:
            self._free[key] = left
        message.left = left
        message.arrived = left + sum(self.links.latency(link) for link in way)
        if message.then is not None:
            message.then(message)
        return True

    def _key(self, link: tuple[int, int]) -> tuple[int, int]:
        return link if self.links.duplex == "full" else (min(link), max(link))


@dataclass
class _Times:
    """The messages of one collective, by key; what has arrived, and who waits for it."""

    arrived: dict[tuple[int, ...], float] = field(default_factory=dict)
    waiting: dict[tuple[int, ...], Callable[[float], None]] = field(default_factory=dict)
    # Per member: messages that it has still to send or to get, and when the last one was done.
    open: dict[int, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


class _LinkPending:
    """Something under way on the links."""

    def __init__(
        self,
        comm: LinkComm,
        ready: Callable[[], bool],
        what: str,
        ended: Callable[[], float],
    ) -> None:
        self._comm = comm
        self._ready = ready
        self._what = what
        self._ended = ended

    def wait(self) -> None:
        self._comm.links.wait(self._comm.number, self._ready, self._what)
        self._comm.at(self._ended())


class LinkComm(ThreadComm):
    """:class:`~shoal.parallel.protocols.Comm` on links that take time."""

    @property
    def links(self) -> _LinkWorld:
        """The ranks' clocks and links."""
        assert isinstance(self.shared, _LinkWorld)
        return self.shared

    @property
    def number(self) -> int:
        """Number of this rank in the whole job."""
        return self.ranks[self.rank]

    @property
    def now(self) -> float:
        """This rank's clock, seconds."""
        return self.links.clocks[self.number]

    def compute(self, seconds: float) -> None:
        """Be busy for so long."""
        require(seconds >= 0, "compute", seconds, expected="seconds, 0 or more")
        self.at(self.now + seconds)

    def at(self, time: float) -> None:
        """Move the clock to ``time``, never back."""
        self.links.clocks[self.number] = max(self.now, time)

    def _sent(self, target: int, nbytes: int) -> Any:
        message = _Message(self.number, self.ranks[target], nbytes)
        with self.shared.changed:
            self.links.issue(message, self.now, self.links.number(self.number))
        return message

    def _posted(self, post: PendingMessage, peer: int, what: str, *, sends: bool) -> Pending:
        def ended() -> float | None:
            message: _Message | None = post.times
            if message is None or not post.done:
                return None
            return message.left if sends else message.arrived

        return _LinkPending(self, lambda: ended() is not None, what, lambda: ended() or 0.0)

    def _carried(
        self, meeting: PendingCollective, op: str, tag: str, sizes: list[int], root: int
    ) -> Pending:
        """Send this rank's messages of the collective, each when what it depends on is there."""
        rank = self.rank
        with self.shared.changed:
            if meeting.times is None:
                meeting.times = _Times()
            times: _Times = meeting.times
            sends, gets = _messages(op, rank, self.world, sizes, root)
            times.open[rank] = times.open.get(rank, 0) + len(sends) + gets
            times.ended[rank] = max(times.ended.get(rank, 0.0), self.now)
            for key, target, nbytes, after in sends:
                self._send_after(times, key, target, nbytes, after)

        def ready() -> bool:
            return meeting.done and times.open[rank] == 0

        what = f"{op} {tag!r}" if tag else op
        return _LinkPending(
            self, ready, f"{what} of ranks {list(self.ranks)}", lambda: times.ended[rank]
        )

    def _send_after(
        self,
        times: _Times,
        key: tuple[int, ...],
        target: int,
        nbytes: float,
        after: tuple[int, ...] | None,
    ) -> None:
        rank, here, links = self.rank, self.now, self.links
        number = links.number(self.number)

        def count(member: int, time: float) -> None:
            times.open[member] = times.open.get(member, 0) - 1
            times.ended[member] = max(times.ended.get(member, 0.0), time)

        def then(message: _Message) -> None:
            assert message.left is not None
            assert message.arrived is not None
            count(rank, message.left)
            count(target, message.arrived)
            times.arrived[key] = message.arrived
            if key in times.waiting:
                times.waiting.pop(key)(message.arrived)

        message = _Message(self.number, self.ranks[target], nbytes, then=then)

        def go(time: float) -> None:
            links.issue(message, max(here, time), number)

        if after is None or after in times.arrived:
            go(times.arrived[after] if after is not None else here)
        else:
            times.waiting[after] = go


def _messages(
    op: str, rank: int, world: int, sizes: list[int], root: int
) -> tuple[list[tuple[tuple[int, ...], int, float, tuple[int, ...] | None]], int]:
    """What ``rank`` sends in a collective, and how many messages it gets.

    Returns:
        (key, target, bytes, key of the message to it that must have arrived) of each, and the
        number of messages to it.
    """
    if world == 1:
        return [], 0
    if op == "all_to_all":
        peers = [(rank + step) % world for step in range(1, world)]
        return [((rank, peer), peer, sizes[peer], None) for peer in peers], world - 1
    part = sizes[0] / world
    following, before = (rank + 1) % world, (rank - 1) % world
    if op in ("broadcast", "reduce"):
        # Down a chain in as many pieces as ranks: away from the root, or towards it.
        place = (rank - root - (op == "reduce")) % world
        sends, gets = place < world - 1, place > 0
        return [
            ((piece, rank), following, part, (piece, before) if gets else None)
            for piece in range(world)
            if sends
        ], world * gets
    steps = 2 * (world - 1) if op in ("all_reduce", "barrier") else world - 1
    return [
        ((step, rank), following, part, (step - 1, before) if step else None)
        for step in range(steps)
    ], steps
