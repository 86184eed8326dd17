"""Actors: pipelining, back-pressure and freedom from deadlock out of counted registers.

An actor makes one item after the other. It has a pool of ``regs`` registers for what
it makes and a counter of filled registers for each of its inputs; it *acts* when every
input has a filled register and one of its own is free. Then it says ``req`` to its
consumers and ``ack`` to its producers; a register is free again when all of its consumers
have said ``ack``. Nothing else is needed: two registers are double buffering, and a
slow consumer holds its producers' registers and so holds them up.

Every queue is a thread that drains a mailbox; an actor belongs to one queue and only
that thread touches it. A graph can be shown not to deadlock before it starts: the actors
and their req and ack counters are a marked graph, which lives exactly if there is a token
on every cycle of it (Commoner, Holt, Even and Pnueli, 1971).

Source: Yuan et al., OneFlow, 2021, section 4.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from shoal.core.errors import PlanError, ShoalError, nearest, require

_T = TypeVar("_T")


@dataclass(frozen=True)
class ActorCounts:
    """What one actor did.

    Args:
        items: times it acted.
        peak: most registers that were in use at once.
        regs: registers that it has.
    """

    items: int
    peak: int
    regs: int


@dataclass
class _Register:
    """Something made, and how many consumers still have it."""

    owner: _Actor
    value: Any
    readers: int


@dataclass
class _Edge:
    """From a producer to one input of a consumer; ``filled`` counts by its length."""

    source: _Actor
    target: _Actor
    initial: tuple[Any, ...] = ()
    filled: deque[_Register] = field(default_factory=deque)


@dataclass
class _Actor:
    """State of an actor; its queue's thread alone touches it."""

    name: str
    act: Callable[..., Any]
    regs: int
    queue: str
    inputs: list[_Edge] = field(default_factory=list)
    outputs: list[_Edge] = field(default_factory=list)
    used: int = 0
    peak: int = 0
    items: int = 0


class ActorGraph:
    """Actors and their consumers.

    ::

        graph = ActorGraph()
        graph.actor("load", load)                       # load(i)
        graph.actor("transform", transform, "load")     # transform(item)
        graph.actor("compute", compute, "transform")
        graph.run(100)
    """

    def __init__(self) -> None:
        self._actors: dict[str, _Actor] = {}

    def actor(
        self,
        name: str,
        act: Callable[..., Any],
        *inputs: str,
        regs: int = 2,
        queue: str | None = None,
    ) -> None:
        """Add an actor.

        Args:
            name: a name of its own.
            act: called with one item of each input, in their order, or with the number of
                the item, from 0, where there are none; returns what is made.
            inputs: actors whose items it takes, added before.
            regs: registers for what it makes.
            queue: thread in which it acts; one of its own if not given.

        Raises:
            PlanError: a name twice, an unknown input, or no register.
        """
        require(
            bool(name) and name not in self._actors,
            "actor",
            name,
            expected="a name of its own",
            error=PlanError,
        )
        require(
            regs >= 1,
            f"actor {name}: regs",
            regs,
            expected="at least 1; without a register it could never act, 2 overlap",
            error=PlanError,
        )
        for source in inputs:
            self._known(source, f"actor {name}: inputs")
        made = _Actor(name, act, regs, queue or name)
        self._actors[name] = made
        for source in inputs:
            self._join(self._actors[source], made, ())

    def feed_back(self, source: str, target: str, initial: Sequence[Any]) -> None:
        """Give ``target`` one more input, from an actor that may come after it.

        Args:
            source: the actor that makes the items.
            target: the actor that takes them.
            initial: items that it takes before the first one made; without any, a
                cycle could never start.

        Raises:
            PlanError: an unknown actor.
        """
        for name in (source, target):
            self._known(name, "feed_back")
        self._join(self._actors[source], self._actors[target], tuple(initial))

    def check(self) -> None:
        """Check whether this graph can run for ever.

        Raises:
            PlanError: it cannot; names the actors that would wait for each other.
        """
        require(bool(self._actors), "actors", 0, expected="at least one", error=PlanError)
        # Edge (a, b, tokens): b's item i needs a's item i - tokens.
        forward = [
            (edge.source.name, edge.target.name, len(edge.initial))
            for actor in self._actors.values()
            for edge in actor.outputs
        ]
        stuck = _dead_cycle(list(self._actors), forward)
        if stuck:
            raise PlanError(
                f"actors {_circle(stuck)}: a cycle without initial tokens; every one of them "
                "waits for the one before; give one of its inputs items to begin with "
                "(feed_back(..., initial=[...]))"
            )
        back = [
            (edge.target.name, edge.source.name, actor.regs - len(edge.initial))
            for actor in self._actors.values()
            for edge in actor.outputs
        ]
        stuck = _dead_cycle(list(self._actors), [*forward, *back])
        if stuck:
            ahead = {(source, target) for source, target, _ in forward}
            pairs = zip(stuck, [*stuck[1:], stuck[0]], strict=True)
            owners = [owner for user, owner in pairs if (user, owner) not in ahead]
            few = min(owners or stuck, key=lambda name: self._actors[name].regs)
            raise PlanError(
                f"actors {_circle(stuck)}: too few registers; each would wait for another to "
                f"give one back; give {few!r} more than {self._actors[few].regs}"
            )

    def run(self, items: int) -> dict[str, ActorCounts]:
        """Let every actor act ``items`` times.

        Returns:
            What each actor did.

        Raises:
            PlanError: the graph would deadlock.
            Exception: the first error of any actor, which names the actor and the item; all
                others have ended.
        """
        require(items >= 0, "items", items, expected="at least 0", error=PlanError)
        with _Run(self._actors.values(), items, None) as running:
            self.check()
            running.start()
            running.finished.wait()
        return running.counts()

    def stream(self, name: str) -> Iterator[Any]:
        """Items of an actor, in order and without end; closing the iterator ends all actors.

        The reader is a consumer: it gives an item's register back when it asks for the next.

        Raises:
            PlanError: no such actor, or the graph would deadlock.
            Exception: the first error of any actor.
        """
        self._known(name, "stream")
        self.check()
        return self._stream(name)

    def _stream(self, name: str) -> Iterator[Any]:
        with _Run(self._actors.values(), None, name) as running:
            running.start()
            while True:
                register = running.reader.get()
                if register is None:
                    return
                value = register.value
                yield value
                del value
                running.ack(register)
                del register

    def _known(self, name: str, where: str) -> None:
        require(
            name in self._actors,
            where,
            name,
            expected=f"an actor that was added: {', '.join(self._actors) or 'there is none'}",
            hint=nearest(name, self._actors),
            error=PlanError,
        )

    @staticmethod
    def _join(source: _Actor, target: _Actor, initial: tuple[Any, ...]) -> None:
        edge = _Edge(source, target, initial)
        source.outputs.append(edge)
        target.inputs.append(edge)


def _circle(names: Sequence[str]) -> str:
    return " -> ".join(repr(name) for name in (*names, names[0]))


def _dead_cycle(names: Sequence[str], edges: Sequence[tuple[str, str, int]]) -> list[str]:
    """A cycle with no token on it, by Bellman and Ford; empty if there is none."""
    # Tokens are weighed so that a cycle is negative exactly if it has none of them.
    weight = len(names) + 1
    distance = dict.fromkeys(names, 0)
    before: dict[str, str] = {}
    last = ""
    for _ in names:
        last = ""
        for source, target, tokens in edges:
            way = distance[source] + tokens * weight - 1
            if way < distance[target]:
                distance[target], before[target], last = way, source, target
    if not last:
        return []
    for _ in names:
        last = before[last]
    cycle = [last]
    while before[cycle[-1]] != last:
        cycle.append(before[cycle[-1]])
    return cycle[::-1]


class _Run:
    """One run of a graph: fresh registers, a thread for each queue."""

    def __init__(self, actors: Any, items: int | None, reader: str | None) -> None:
        self.items = items
        self.finished = threading.Event()
        self.reader: queue.SimpleQueue[_Register | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._read = reader
        self._actors = list(actors)
        self._left = len(self._actors)
        self._boxes = {actor.queue: _Mailbox() for actor in self._actors}
        self._threads: list[threading.Thread] = []
        for actor in self._actors:
            actor.used = actor.peak = actor.items = 0
            for edge in actor.inputs:
                # Tokens to begin with are in no pool.
                edge.filled = deque(_Register(actor, value, 0) for value in edge.initial)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()
        for actor in self._actors:
            for edge in actor.inputs:
                edge.filled.clear()
        if self.failure is not None:
            raise self.failure

    def start(self) -> None:
        if self.items == 0:
            self.finished.set()
            return
        for name, box in self._boxes.items():
            thread = threading.Thread(
                target=self._drain, args=(name, box), name=f"actors {name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopping = True
        for box in self._boxes.values():
            box.put(None)

    def counts(self) -> dict[str, ActorCounts]:
        return {a.name: ActorCounts(a.items, a.peak, a.regs) for a in self._actors}

    def ack(self, register: _Register) -> None:
        """A consumer is done with a register; its owner's thread is notified."""
        self._boxes[register.owner.queue].put(("ack", register, None))

    def _drain(self, name: str, box: _Mailbox) -> None:
        for actor in self._actors:
            if actor.queue == name:
                self._fire(actor)
        while (message := box.get()) is not None:
            kind, register, edge = message
            if kind == "ack":
                actor = register.owner
                register.readers -= 1
                if register.readers == 0:
                    register.value = None
                    actor.used -= 1
            else:
                actor = edge.target
                edge.filled.append(register)
                self._give_back(actor)
            del message, register, edge
            self._fire(actor)

    def _fire(self, actor: _Actor) -> None:
        """Act as long as every input is filled and a register is free."""
        while (
            not self._stopping
            and actor.used < actor.regs
            and (self.items is None or actor.items < self.items)
            and all(edge.filled for edge in actor.inputs)
        ):
            taken = [edge.filled.popleft() for edge in actor.inputs]
            actor.used += 1
            actor.peak = max(actor.peak, actor.used)
            arguments = [register.value for register in taken] if taken else [actor.items]
            try:
                value = actor.act(*arguments)
            except BaseException as error:
                self._fail(actor, error)
                return
            del arguments
            readers = len(actor.outputs) + (actor.name == self._read)
            made = _Register(actor, value, readers)
            del value
            for edge in actor.outputs:
                self._boxes[edge.target.queue].put(("req", made, edge))
            if actor.name == self._read:
                self.reader.put(made)
            if readers == 0:
                actor.used -= 1
            del made
            for register in taken:
                if register.readers:
                    self.ack(register)
            del taken
            actor.items += 1
            if actor.items == self.items:
                self._give_back(actor)
                self._done()

    def _give_back(self, actor: _Actor) -> None:
        """An actor that has acted its last time holds no other up with what it will not take."""
        if actor.items == self.items:
            for edge in actor.inputs:
                for register in edge.filled:
                    if register.readers:
                        self.ack(register)
                edge.filled.clear()

    def _done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.finished.set()

    def _fail(self, actor: _Actor, error: BaseException) -> None:
        with self._lock:
            if self.failure is not None:
                return
            where = f"actor {actor.name!r}, item {actor.items}"
            if isinstance(error, ShoalError):
                error.args = (f"{where}: {error}",)
            else:
                error.add_note(f"in {where}")
            self.failure = error
        self.stop()
        self.reader.put(None)
        self.finished.set()


class _Mailbox(queue.SimpleQueue[Any]):
    """Messages to the actors of one queue; None ends it."""


class _Failed:
    """What stands in the place of an item that could not be made."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class PrefetchQueue(Generic[_T]):
    """Items made ahead of use; :func:`prefetch` makes it.

    An iterator over what the function returns for first, first + 1, ...; and a context
    manager that ends the thread.
    """

    def __init__(self, function: Callable[[int], _T], first: int, depth: int) -> None:
        self._function = function
        self._depth = depth
        self._start(first)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        item = next(self._items)
        self.step += 1
        if isinstance(item, _Failed):
            self.close()
            raise item.error
        value: _T = item
        return value

    def get(self, step: int) -> _T:
        """The item of ``step``; starts again there if that is not the next one.

        Raises:
            Exception: what the function raised for this step.
        """
        if step != self.step or self._closed:
            self.close()
            self._start(step)
        return next(self)

    def close(self) -> None:
        """End the thread, once it has made what it is at; may be called twice."""
        self._closed = True
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, first: int) -> None:
        self.step = first
        """The next item's."""
        self._closed = False
        graph = ActorGraph()
        failed = False

        def make(i: int) -> Any:
            nonlocal failed
            if failed:
                return None  # it will not be asked for
            try:
                return self._function(first + i)
            except Exception as error:  # raised to the caller of this step
                failed = True
                return _Failed(error)

        graph.actor("make", make, regs=self._depth)
        self._items: Any = graph.stream("make")


def prefetch(function: Callable[[int], _T], first: int, depth: int = 2) -> PrefetchQueue[_T]:
    """Call ``function(first)``, ``function(first + 1)``, ... ahead of the use of the results.

    Results are in order. An exception of a call is raised in place of its result and ends the
    iteration; all earlier results are delivered. Nothing starts before the first item is requested.

    Args:
        function: depends on the step alone; runs in one thread of its own.
        first: step of the first item.
        depth: items that exist at once, the one in use included: 2 make the next one
            meanwhile.

    Raises:
        PlanError: no item may exist.
    """
    require(
        depth >= 1,
        "prefetch: depth",
        depth,
        expected="at least 1; 2 make the next item while one is used",
        error=PlanError,
    )
    return PrefetchQueue(function, first, depth)
