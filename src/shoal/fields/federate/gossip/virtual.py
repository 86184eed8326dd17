"""Nodes on a virtual clock: time is computed, work is real or left out."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.fields.federate.gossip.protocols import GossipNode, Push

_WORK, _PUSH, _EXCHANGE = range(3)


@dataclass
class VirtualGossip:
    """Drives nodes.

    Args:
        nodes: by number.
        link_s: seconds that a message of a node is on its way, by number of the sender.
        now: s.

    Attributes:
        messages: that were sent; an exchange is two.
        exchanges: of pairs.
    """

    nodes: Sequence[GossipNode]
    link_s: Sequence[float]
    now: float = 0.0
    messages: int = 0
    exchanges: int = 0
    _queue: list[tuple[float, int, int, int]] = field(default_factory=list)
    _pushed: dict[int, tuple[int, Push]] = field(default_factory=dict)
    _number: int = 0

    def begin(self) -> None:
        """All nodes begin."""
        # Of work and exchanges, the one entry of a node that counts.
        self._current: dict[tuple[int, int], int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Ask all nodes again what they do next, as when the edges of a graph have changed."""
        for at in range(len(self.nodes)):
            self._schedule(at)

    def step(self) -> bool:
        """The next event; false if there is none."""
        while self._queue:
            when, number, kind, at = heapq.heappop(self._queue)
            if kind != _PUSH and self._current.get((kind, at)) != number:
                continue
            self.now = when
            if kind == _WORK:
                self._work(at)
            elif kind == _EXCHANGE:
                self._exchange(at)
            else:
                sender, push = self._pushed.pop(number)
                self.nodes[at].receive(sender, push, self.now)
                self._schedule(at)
            return True
        return False

    def _work(self, at: int) -> None:
        node = self.nodes[at]
        due = node.due(self.now)
        if due is not None and due <= self.now:
            result = node.compute(node.begin(self.now))
            for push in node.finish(result, self.now):
                self.messages += 1
                self._put(self.now + self.link_s[at], _PUSH, push.to)
                self._pushed[self._number] = at, push
        self._schedule(at)

    def _exchange(self, at: int) -> None:
        """At one moment: where both ends are one process, none is ever busy."""
        due = self.nodes[at].exchange_due(self.now)
        if due is not None and due[0] <= self.now:
            peer = due[1]
            one, other = self.nodes[at], self.nodes[peer]
            mine, theirs = one.offer(peer, self.now), other.offer(at, self.now)
            one.settle(peer, mine, theirs, self.now)
            other.settle(at, theirs, mine, self.now)
            self.messages += 2
            self.exchanges += 1
            self._schedule(peer)
        self._schedule(at)

    def _schedule(self, at: int) -> None:
        """When the node works and exchanges next."""
        node = self.nodes[at]
        due, exchange = node.due(self.now), node.exchange_due(self.now)
        # What was scheduled before counts no more.
        self._current.pop((_WORK, at), None)
        self._current.pop((_EXCHANGE, at), None)
        if due is not None:
            self._put(max(due, self.now), _WORK, at)
        if exchange is not None:
            self._put(max(exchange[0], self.now), _EXCHANGE, at)

    def _put(self, when: float, kind: int, at: int) -> None:
        self._number += 1
        if kind != _PUSH:
            self._current[kind, at] = self._number
        heapq.heappush(self._queue, (when, self._number, kind, at))
