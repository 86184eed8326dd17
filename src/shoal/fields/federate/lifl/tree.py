"""The aggregators of one host: how many, which level each works at, and what it is given.

Updates go to leaves, ``fan_in`` to each; what leaves have summed goes to the one middle, which has
made an object of its sum after so many and goes on from it. A worker that has finished is idle and
takes the next task, of whatever level: that is how a leaf becomes the middle or the top. Inputs are
kept until the sum they are in is an object, so the task of a worker that dies is begun anew.

This is the whole state of a host, without sockets: :class:`Tree` says through ``send`` which worker
is to add which object; what workers have done reaches it as calls.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.fields.federate.lifl.store import NUDGE, ROWS, ObjectStore

LEAF, MIDDLE, TOP = 0, 1, 2
_ALPHA = 0.7
# Workers that die one after the other without adding anything.
_DEATHS = 5


class AggregatorWorkers(Protocol):
    """Starts workers, and sends them keys."""

    def start(self, row: int) -> None:
        """Start one that has a row of the store."""

    def send(self, row: int, key: bytes) -> None:
        """Send it a key, or a nudge."""

    def stop(self, row: int) -> None:
        """Let it end."""

    def give_up(self) -> None:
        """Workers die as soon as they are given something."""


@dataclass
class _Task:
    """What a worker is adding up.

    Args:
        level: 0 for a leaf.
        out: slot of the sum.
        given: keys that it was sent.
        done: those that are in the sum.
    """

    level: int
    out: int
    given: list[bytes] = field(default_factory=list)
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """How the aggregators of a host are scaled.

    Args:
        fan_in: updates of a leaf, I.
        most: workers at most.
        eager: add objects as they come; else when all of a task are there.
        reuse: let a worker that has finished take another task.
        keep_s: seconds for which an idle one stays.
    """

    fan_in: int
    most: int
    eager: bool
    reuse: bool
    keep_s: float


class Tree:
    """The aggregators of one host.

    Args:
        store: of the host; this is its owner.
        size: numbers of an update.
        options: how it is scaled.
        workers: does what it says.

    Attributes:
        starts: of processes.
        sent: keys that were sent.
        queue: estimate of the updates that wait at once, which is what it scales by.
    """

    def __init__(
        self, store: ObjectStore, size: int, options: TreeOptions, workers: AggregatorWorkers
    ) -> None:
        self._store, self._size, self._options, self._workers = store, size, options, workers
        self._updates: deque[bytes] = deque()
        self._sums: deque[bytes] = deque()
        self._tasks: dict[int, _Task] = {}
        self._idle: dict[int, float] = {}
        self._rows = list(range(ROWS - 1, -1, -1))
        self._flush: Callable[[bytes | None], None] | None = None
        self._last = MIDDLE
        self._expected = self._longest = 0
        self.starts = self.sent = self._deaths = 0
        self.queue = 0.0

    @property
    def reserve(self) -> int:
        """Slots that must stay free for sums, whatever comes from clients."""
        return self._options.most + 2

    @property
    def workers(self) -> int:
        """Those that run."""
        return len(self._tasks) + len(self._idle)

    # Events

    def add(self, key: bytes) -> None:
        """An update that is to be summed."""
        self._updates.append(key)
        working = sum(
            len(task.given) - task.done for task in self._tasks.values() if task.level == LEAF
        )
        self._longest = max(self._longest, len(self._updates) + working)
        self._go()

    def add_sum(self, key: bytes) -> None:
        """A sum that another host has made."""
        self._expected -= 1
        self._sums.append(key)
        self._go()

    def flush(self, expected: int, top: bool, ready: Callable[[bytes | None], None]) -> None:
        """No more updates come: make one sum of all.

        Args:
            expected: sums of other hosts that it is to have.
            top: it is the sum of all hosts.
            ready: called with its key; None if there was nothing.
        """
        self._expected += expected
        self._flush, self._last = ready, TOP if top else MIDDLE
        middle = self._middle()
        if middle is not None:
            self._store.workers[middle]["role"] = self._last
        self._go()

    def done(self, row: int, key: bytes) -> None:
        """A worker has added an object."""
        task = self._tasks.get(row)
        if task is None or key not in task.given:
            return
        task.done += 1
        self._deaths = 0
        self._go()

    def died(self, row: int) -> None:
        """A worker is gone; what it was given is given to others."""
        self._rows.append(row)
        self._idle.pop(row, None)
        task = self._tasks.pop(row, None)
        if task is not None:
            self._store.give_back(task.out)
            (self._updates if task.level == LEAF else self._sums).extendleft(reversed(task.given))
        self._deaths += 1
        if self._deaths > _DEATHS:
            self._workers.give_up()
            return
        self._go()

    def stop_idle(self, now: float) -> None:
        """End workers that have been idle for long."""
        for row, since in list(self._idle.items()):
            if now - since > self._options.keep_s:
                self._end(row)

    # What follows

    def _go(self) -> None:
        """Do whatever can be done now: what is finished makes room for more."""
        before: tuple[int, ...] = ()
        while before != (before := self._counts()):
            self._finish()
            while self._updates and self._give(self._updates, LEAF, self._options.fan_in):
                pass
            if len(self._sums) > 1 or (self._sums and self._middle() is not None):
                level = MIDDLE if self._flush is None else self._last
                while self._sums and self._give(self._sums, level, self._fan_out):
                    pass
        self._answer()

    def _counts(self) -> tuple[int, ...]:
        return len(self._tasks), len(self._updates), len(self._sums), self.sent

    @property
    def _fan_out(self) -> int:
        """Sums after which a middle makes an object of its own: bounds the inputs that are kept."""
        return max(2, self._options.most)

    def _middle(self) -> int | None:
        return next((row for row, task in self._tasks.items() if task.level != LEAF), None)

    def _give(self, keys: deque[bytes], level: int, most: int) -> bool:
        """Give the first key to a worker of this level with room; false if none can be had."""
        row = next(
            (
                row
                for row, task in self._tasks.items()
                if (task.level == LEAF) == (level == LEAF) and len(task.given) < most
            ),
            None,
        )
        if row is None:
            if level != LEAF and self._middle() is not None:
                return False  # one middle at a time, which must make room first
            row = self._begin(level)
            if row is None:
                return False
        task = self._tasks[row]
        key = keys.popleft()
        task.given.append(key)
        record = self._store.workers[row]
        if not self._options.eager:
            closes = self._closes(task)
            record["lazy"] = len(task.given) if closes else most
        self._send(row, key)
        return True

    def _closes(self, task: _Task) -> bool:
        """Whether a task gets no more, though it could take some."""
        if self._flush is None:
            return False
        if task.level == LEAF:
            return not self._updates
        leaves = any(one.level == LEAF for one in self._tasks.values())
        return not (self._updates or self._sums or leaves or self._expected > 0)

    def _begin(self, level: int) -> int | None:
        """A worker with a new task: an idle one, or one that is started if there may be more."""
        row = next(iter(self._idle), None)
        if row is None and self.workers >= self._limit(level):
            return None
        out = self._store.reserve()
        if out is None:
            return None
        if row is None:
            row = self._rows.pop()
            self._store.workers[row] = 0
            self.starts += 1
            self._workers.start(row)
        self._idle.pop(row, None)
        record = self._store.workers[row]
        record["role"], record["out"], record["folded"], record["lazy"] = level, out, 0, 0
        self._tasks[row] = _Task(level, out)
        return row

    def _limit(self, level: int) -> int:
        """Workers that the queue is worth; a middle may always be had beside the leaves."""
        waiting = max(self.queue, self._longest)
        leaves = min(self._options.most, max(1, math.ceil(waiting / self._options.fan_in)))
        return min(leaves + (level != LEAF or self._middle() is not None), ROWS)

    def _finish(self) -> None:
        """Make objects of the sums that are complete."""
        for row, task in list(self._tasks.items()):
            full = self._options.fan_in if task.level == LEAF else self._fan_out
            if task.done < len(task.given) and not self._options.eager and self._closes(task):
                record = self._store.workers[row]
                if record["lazy"] != len(task.given):
                    record["lazy"] = len(task.given)
                    self._send(row, NUDGE)
            if not task.given or task.done < len(task.given):
                continue
            if len(task.given) < full and not self._closes(task):
                continue
            facts = [self._store.facts(key) for key in task.given]
            key = self._store.publish(
                task.out,
                offset=0,
                count=self._size,
                coefficient=1.0,
                weight=sum(one.weight for one in facts),
                updates=sum(one.updates for one in facts),
            )
            for one in task.given:
                self._store.release(one)
            del self._tasks[row]
            self._sums.append(key)
            self._idle[row] = time.monotonic()
            if not self._options.reuse:
                self._end(row)

    def _answer(self) -> None:
        """Say that all is summed, if it is."""
        if self._flush is None or self._updates or self._tasks or self._expected > 0:
            return
        if len(self._sums) > 1:
            return
        ready, self._flush = self._flush, None
        self.queue = _ALPHA * self._longest + (1 - _ALPHA) * self.queue
        self._longest = 0
        ready(self._sums.popleft() if self._sums else None)

    def _end(self, row: int) -> None:
        self._idle.pop(row, None)
        self._rows.append(row)
        self._workers.stop(row)

    def _send(self, row: int, key: bytes) -> None:
        self.sent += 1
        self._workers.send(row, key)
