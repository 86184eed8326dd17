"""Ranks that are threads of one process: the same programs, and no process to start.

What runs on real ranks runs here unchanged, deterministically, and ends at once where
real ranks would hang: if every rank waits and none can go on, that is an error which says
who waits for what; so is a collective in which two ranks ask for different things; and an
error in one rank ends all.

Collectives are carried out by the rank that comes last; a message is copied when both
ends have come, so a sender may wait for its receiver just as it would on a network. The
tensors lie in the memory of the host, where a backward pass runs in the thread that
called it and may communicate.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from shoal.core.errors import RankError, ShoalError, require
from shoal.core.meter import Meter
from shoal.parallel.comm.calls import (
    check_member,
    check_pairs,
    check_partition,
    check_parts,
    check_peer,
    like,
    shown,
)
from shoal.parallel.comm.wire import TrafficCounter, ring_all_reduce_bytes, ring_gather_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Pending

_T = TypeVar("_T")


def run_ranks(
    world: int,
    function: Callable[[ThreadComm], _T],
    *,
    meter: Meter | None = None,
    timeout_s: float = 60.0,
    ranks_per_node: int | None = None,
) -> list[_T]:
    """Run ``function`` on ``world`` ranks, each in a thread of its own.

    Args:
        world: number of ranks.
        function: what a rank does; its communicator names it. Torch's default generator is
            one for all threads: draw from generators of your own.
        meter: shared by the ranks; without one each rank counts for itself.
        timeout_s: a rank that waits longer for another one fails.
        ranks_per_node: ranks of one emulated node; all on one if not given.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the first error of any rank, which names the rank; all others have ended.
    """
    return ThreadWorld(world, timeout_s).run(
        lambda shared, rank: function(
            ThreadComm.whole(shared, rank, meter or Meter(), ranks_per_node)
        )
    )


class _StoppedError(RankError):
    """Another rank failed; this one cannot go on."""


@dataclass
class PendingCollective:
    """A collective that not all ranks have come to."""

    first: int
    call: tuple[Any, ...]
    parts: dict[int, Any] = field(default_factory=dict)
    done: bool = False
    result: Any = None
    times: Any = None


@dataclass
class PendingMessage:
    """One end of a message."""

    tensor: Tensor
    done: bool = False
    times: Any = None


@dataclass
class _Group:
    """What the members of one communicator share."""

    meetings: dict[int, PendingCollective] = field(default_factory=dict)
    # (source, target, tag) -> ends that wait for their other end.
    sends: defaultdict[tuple[int, int, str], deque[PendingMessage]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    receives: defaultdict[tuple[int, int, str], deque[PendingMessage]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class ThreadWorld:
    """The threads of one run, and who of them waits for what.

    Args:
        size: number of ranks.
        timeout_s: a rank that waits longer fails.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        require(size >= 1, "world", size, expected="at least 1 rank")
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.group = _Group()
        self.running = set(range(size))
        self.failure: tuple[int | None, BaseException] | None = None
        # Rank -> (whether it may go on, what it waits for).
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}

    def run(self, function: Callable[[Any, int], _T]) -> list[_T]:
        """Run ``function(world, rank)`` on every rank; see :func:`run_ranks`."""
        import torch

        results: dict[int, _T] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = function(self, rank)
            except BaseException as error:
                self.fail(rank, error)
            finally:
                self.end(rank)

        threads = [
            threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        # The vector mathematics under exp() sets itself up on first use, and where two threads are
        # first at once it has been seen to compute with an error of 1e-9; so one is, here.
        for dtype in (torch.float32, torch.float64):
            torch.zeros(1, dtype=dtype).exp_()
        before = torch.get_num_threads()
        torch.set_num_threads(max(1, before // self.size))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as stopped:  # Ctrl-C while the ranks run: they end as well
            self.fail(None, stopped)
            raise
        finally:
            torch.set_num_threads(before)
        if self.failure is not None:
            rank, error = self.failure
            if rank is not None and isinstance(error, ShoalError):
                error.args = (f"rank {rank}: {error}",)
            elif rank is not None:
                error.add_note(f"on rank {rank} of {self.size}")
            raise error
        return [results[rank] for rank in range(self.size)]

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Remember the first real error and wake all ranks."""
        with self.changed:
            if self.failure is None and not isinstance(error, _StoppedError):
                self.failure = (rank, error)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """The rank has ended; those who wait for it must not wait on."""
        with self.changed:
            self.running.discard(rank)
            self._look()

    def check(self) -> None:
        """Stop this rank if another one has failed; the lock is held."""
        if self.failure is not None:
            rank, error = self.failure
            who = "a rank" if rank is None else f"rank {rank}"
            raise _StoppedError(f"{who} failed: {error}") from error

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Return when ``ready()``; called without the lock."""
        with self.changed:
            if not ready():
                self.waiting[rank] = (ready, what)
                self._look()
                in_time = self.changed.wait_for(
                    lambda: self.failure is not None or ready(), self.timeout_s
                )
                del self.waiting[rank]
                if not in_time:
                    raise RankError(f"waited {self.timeout_s:g} s for {what}: {self._where()}")
            self.check()

    def stuck(self) -> bool:
        """Every rank waits; let one go on if there is a way. The lock is held."""
        return False

    def _look(self) -> None:
        """Check whether any rank can still go on; the lock is held."""
        while (
            self.failure is None
            and self.waiting
            and self.waiting.keys() >= self.running
            and not any(ready() for ready, _ in self.waiting.values())
        ):
            if not self.stuck():
                self.failure = (None, RankError(f"every rank waits for another: {self._where()}"))
        self.changed.notify_all()

    def _where(self) -> str:
        places = []
        for rank in range(self.size):
            if rank in self.waiting:
                places.append(f"rank {rank} in {self.waiting[rank][1]}")
            else:
                places.append(f"rank {rank} {'computes' if rank in self.running else 'has ended'}")
        return ", ".join(places)


class _Later:
    """See :class:`~shoal.parallel.protocols.Pending`."""

    def __init__(self, comm: ThreadComm, ready: Callable[[], bool], what: str) -> None:
        self._comm = comm
        self._ready = ready
        self._what = what

    def wait(self) -> None:
        self._comm.shared.wait(self._comm.ranks[self._comm.rank], self._ready, self._what)


class ThreadComm:
    """:class:`~shoal.parallel.protocols.Comm` between threads; :func:`run_ranks` makes it.

    Every operation also compares what the ranks ask for: kind, tag, shape and type.
    """

    def __init__(
        self,
        shared: ThreadWorld,
        group: _Group,
        rank: int,
        ranks: tuple[int, ...],
        wire: TrafficCounter,
    ) -> None:
        self.shared = shared
        self.group = group
        self.rank = rank
        self.ranks = ranks
        self.world = len(ranks)
        self.wire = wire
        self.ranks_per_node = wire.ranks_per_node
        self.device = "cpu"
        self.meter = wire.meter
        self._turn = 0

    @classmethod
    def whole(
        cls, shared: ThreadWorld, rank: int, meter: Meter, ranks_per_node: int | None
    ) -> Self:
        """The communicator of all ranks, as ``rank`` sees it."""
        ranks = tuple(range(shared.size))
        wire = TrafficCounter(meter, rank, ranks, scope="loopback", ranks_per_node=ranks_per_node)
        return cls(shared, shared.group, rank, ranks, wire)

    def split(self, groups: Sequence[Sequence[int]]) -> Self:
        """The communicator of this rank's group; called by all ranks with the same partition."""
        named = check_partition(groups, self.world)

        def act(_: list[Any]) -> dict[tuple[int, ...], _Group]:
            return {group: _Group() for group in named}

        meeting = self._meet("split", "groups", (named,), None, act)
        self._later(meeting, "split").wait()
        group = next(group for group in named if self.rank in group)
        ranks = tuple(self.ranks[member] for member in group)
        own = self.wire.of(group.index(self.rank), ranks)
        return type(self)(self.shared, meeting.result[group], own.rank, ranks, own)

    def all_reduce(self, x: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum") -> Pending:
        """Reduce ``x`` over all ranks, in place."""

        def act(xs: list[Tensor]) -> None:
            total = _reduced(xs, op)
            for other in xs:
                other.copy_(total)

        return self._ring(
            "all_reduce", tag, ring_all_reduce_bytes, x.nbytes, (*like(x), op), x.detach(), act
        )

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Copy ``x`` from rank ``root``, in place."""
        check_member(root, self.world)

        def act(xs: list[Tensor]) -> None:
            for rank, other in enumerate(xs):
                if rank != root:
                    other.copy_(xs[root])

        return self._ring(
            "broadcast", tag, ring_gather_bytes, x.nbytes, (*like(x), root), x.detach(), act, root
        )

    def reduce(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Sum ``x`` over all ranks into rank ``root``, in place."""
        check_member(root, self.world)

        def act(xs: list[Tensor]) -> None:
            xs[root].copy_(_reduced(xs, "sum"))

        return self._ring(
            "reduce", tag, ring_gather_bytes, x.nbytes, (*like(x), root), x.detach(), act, root
        )

    def all_gather(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [world * n, ...] becomes every rank's ``x`` [n, ...], in rank order."""
        check_parts("all_gather", out, x, self.world)

        def act(pairs: list[tuple[Tensor, Tensor]]) -> None:
            for out, _ in pairs:
                for place, (_, x) in zip(out.view(len(pairs), -1), pairs, strict=True):
                    if place.data_ptr() != x.data_ptr():
                        place.copy_(x.reshape(-1))

        part = (out.detach(), x.detach())
        return self._ring("all_gather", tag, ring_gather_bytes, out.nbytes, like(x), part, act)

    def reduce_scatter(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [n, ...] becomes this rank's part of the sum of ``x`` [world * n, ...]."""
        check_parts("reduce_scatter", x, out, self.world)

        def act(pairs: list[tuple[Tensor, Tensor]]) -> None:
            total = _reduced([x for _, x in pairs], "sum").reshape(-1)
            for (out, _), part in zip(pairs, total.chunk(len(pairs)), strict=True):
                out.view(-1).copy_(part)

        part = (out.detach(), x.detach())
        return self._ring("reduce_scatter", tag, ring_gather_bytes, x.nbytes, like(x), part, act)

    def all_to_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor], *, tag: str) -> Pending:
        """``outs[i]`` becomes what rank i has as its ``xs[rank]``; sizes may differ."""
        check_pairs(outs, xs, self.world)
        for peer, x in enumerate(xs):
            self.wire.pair("all_to_all", x.nbytes, tag, peer)

        def act(parts: list[tuple[list[Tensor], list[Tensor]]]) -> None:
            for target, (outs, _) in enumerate(parts):
                for source, out in enumerate(outs):
                    _deliver("all_to_all", tag, source, parts[source][1][target], target, out)

        part = ([out.detach() for out in outs], [x.detach() for x in xs])
        meeting = self._meet("all_to_all", tag, (), part, act)
        return self._carried(meeting, "all_to_all", tag, [x.nbytes for x in xs], 0)

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        """Send ``x`` to rank ``target``; done when it has been received."""
        check_peer(target, self.rank, self.world)
        self.wire.pair("send", x.nbytes, tag, target)
        post = PendingMessage(x.detach())
        post.times = self._sent(target, x.nbytes)
        key = (self.rank, target, tag)
        with self.shared.changed:
            self.shared.check()
            self.group.sends[key].append(post)
            self._match(key)
        return self._posted(post, target, f"send to {self.ranks[target]} {tag!r}", sends=True)

    def receive(self, out: Tensor, source: int, *, tag: str) -> Pending:
        """Receive into ``out`` what rank ``source`` sends with this tag."""
        check_peer(source, self.rank, self.world)
        post = PendingMessage(out.detach())
        key = (source, self.rank, tag)
        with self.shared.changed:
            self.shared.check()
            self.group.receives[key].append(post)
            self._match(key)
        what = f"receive from {self.ranks[source]} {tag!r}"
        return self._posted(post, source, what, sends=False)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        meeting = self._meet("barrier", "", (), None, lambda _: None)
        self._carried(meeting, "barrier", "", [0], 0).wait()

    def _match(self, key: tuple[int, int, str]) -> None:
        """Copy what both ends have come for; the lock is held."""
        sends, receives = self.group.sends[key], self.group.receives[key]
        while sends and receives:
            sent, received = sends.popleft(), receives.popleft()
            with _carrying():
                _deliver("send", key[2], key[0], sent.tensor, key[1], received.tensor)
            received.times = sent.times
            sent.done = received.done = True
        self.shared.changed.notify_all()

    def _ring(
        self,
        op: str,
        tag: str,
        formula: Callable[[float, int], float],
        nbytes: int,
        call: tuple[Any, ...],
        part: Any,
        act: Callable[[list[Any]], None],
        root: int = 0,
    ) -> Pending:
        if self.world > 1:
            self.wire.ring(op, formula(nbytes, self.world), tag)
        return self._carried(self._meet(op, tag, call, part, act), op, tag, [nbytes], root)

    def _carried(
        self, meeting: PendingCollective, op: str, tag: str, sizes: list[int], root: int
    ) -> Pending:
        """What a collective of so many bytes returns; links take their time here."""
        return self._later(meeting, f"{op} {tag!r}" if tag else op)

    def _sent(self, target: int, nbytes: int) -> Any:
        """A message leaves; links take their time here."""
        return None

    def _posted(self, post: PendingMessage, peer: int, what: str, *, sends: bool) -> Pending:
        """What an end of a message returns."""
        return _Later(self, lambda: post.done, what)

    def _later(self, meeting: PendingCollective, what: str) -> Pending:
        return _Later(self, lambda: meeting.done, f"{what} of ranks {list(self.ranks)}")

    def _meet(
        self,
        op: str,
        tag: str,
        call: tuple[Any, ...],
        part: Any,
        act: Callable[[list[Any]], Any],
    ) -> PendingCollective:
        """Come to the next collective; who comes last carries it out for all."""
        call = (op, tag, *call)
        with self.shared.changed:
            self.shared.check()
            meetings = self.group.meetings
            meeting = meetings.setdefault(self._turn, PendingCollective(self.rank, call))
            if meeting.call != call:
                raise RankError(
                    f"asks for {_spelled(call)} where rank {self.ranks[meeting.first]} asks for "
                    f"{_spelled(meeting.call)}; all ranks must make the same calls in order"
                )
            meeting.parts[self.rank] = part
            if len(meeting.parts) == self.world:
                del meetings[self._turn]
                with _carrying():
                    meeting.result = act([meeting.parts[r] for r in range(self.world)])
                meeting.parts.clear()
                meeting.done = True
                self.shared.changed.notify_all()
            self._turn += 1
            return meeting


@contextlib.contextmanager
def _carrying() -> Iterator[None]:
    """What is done in here is the network's: no rank's autograd or watched memory sees it."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch.no_grad(), _disable_current_modes():
        yield


def _deliver(op: str, tag: str, source: int, x: Tensor, target: int, out: Tensor) -> None:
    require(
        x.numel() == out.numel() and x.dtype == out.dtype,
        f"{op} {tag!r} from rank {source} to rank {target}",
        f"{shown(x)} into {shown(out)}",
        expected="the same size and type at both ends",
        error=RankError,
    )
    out.copy_(x.view(out.shape) if x.is_contiguous() else x.reshape(out.shape))


def _reduced(xs: list[Tensor], op: str) -> Tensor:
    """The sum in rank order, or the maximum."""
    import torch

    total = xs[0].clone()
    for x in xs[1:]:
        if op == "sum":
            total.add_(x)
        else:
            torch.maximum(total, x, out=total)
    return total


def _spelled(call: tuple[Any, ...]) -> str:
    return f"{call[0]} {call[1]!r} {' '.join(str(word) for word in call[2:])}".strip()
