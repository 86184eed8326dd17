"""Messages between a verifier and its drafter, the bytes of each, and the way between them.

A message is a head of five numbers and, after some, a body: tokens and hidden states of a verdict,
tokens and parents of a draft, words of a failure. Where the target's first layers are computed by
the drafter's process, rows of a step cross to it, and their states come back. Weights never pass.
Every byte is counted, and :func:`verdict_bytes`, :func:`draft_bytes` and :func:`layers_bytes` say
beforehand how many there will be.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from shoal.memory.tiers.mover import EmulatedLink

_HEAD = struct.Struct("<5I")
HEAD_BYTES = _HEAD.size
_MOST_BODY = 1 << 30
# A shorter wait is spun: a thread that sleeps wakes up some 60 us late.
_SPIN_S = 1e-3

SPIN_S = 0.02
"""s for which a message is waited for without sleeping by a process that has cores of its own: as
long as a step of the target may take."""


class MessageKind(IntEnum):
    """What a message says."""

    READY = 1
    """drafter: bytes of its weights (low, high)"""
    FAILED = 2
    """drafter: length of the words that follow"""
    VERDICT = 3
    """verifier: request, place of the first token, tokens, the next token (0: none yet) + 1"""
    ASK = 4
    """verifier: request, place behind the root, most nodes"""
    DRAFT = 5
    """drafter: request, nodes, passes that it took since it was asked, and their us"""
    DROP = 6
    """verifier: request"""
    ROOM = 7
    """verifier: number of a cache, its blocks (0: it is no longer needed), tokens of a block"""
    LAYERS = 8
    """verifier: number of a cache, bytes of the body, requests, copies inside the cache"""
    STATES = 9
    """drafter: rows"""


class MessageHeader(NamedTuple):
    """The head of a message; what the numbers mean is with :class:`MessageKind`."""

    kind: int
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0


def verdict_bytes(tokens: int, hidden: int, itemsize: int) -> int:
    """Bytes of a verdict: head, and a number and a hidden state of each token.

    Args:
        tokens: that are certain now.
        hidden: width of the target.
        itemsize: bytes of one number of a hidden state.
    """
    return HEAD_BYTES + tokens * (4 + hidden * itemsize)


def draft_bytes(nodes: int) -> int:
    """Bytes of a draft and of asking for it: two heads, and a number and a parent of each node."""
    return 2 * HEAD_BYTES + nodes * 5


def layers_bytes(
    rows: int, width: int, *, requests: int, blocks: int, tree_rows: int, copies: int, numbers: int
) -> int:
    """Bytes of a step's rows on their way to the first layers, and of their states on theirs back.

    Args:
        rows: of the step.
        width: bytes of a state.
        requests: that they are of.
        blocks: of the cache that these hold.
        tree_rows: rows that are of trees; each has a depth and says what it sees.
        copies: times that tokens or blocks are copied inside the cache.
        numbers: that say from where to where.
    """
    words = rows + 4 * requests + blocks + 2 * copies + numbers
    return 2 * HEAD_BYTES + 4 * words + 9 * tree_rows + rows * width


class Channel:
    """One end of the way between both processes.

    Args:
        link: emulated link that delays messages; None for no delay.
        spin_s: s for which a message is waited for without sleeping; see :data:`SPIN_S`.

    Attributes:
        sent: bytes.
        received: bytes.
    """

    def __init__(
        self, end: socket.socket, link: EmulatedLink | None = None, spin_s: float = 0.0
    ) -> None:
        self._end, self._link, self._spin_s = end, link, spin_s
        self.sent = self.received = 0

    def send(self, head: MessageHeader, body: bytes = b"") -> None:
        """Send one message.

        Raises:
            OSError: no process is at the other end.
        """
        data = _HEAD.pack(*head) + body
        if self._link is not None:
            _wait(self._link.book(len(data)))
        self._end.sendall(data)
        self.sent += len(data)

    def head(self) -> MessageHeader:
        """The next message's head.

        Raises:
            EOFError: the other end is closed.
        """
        if self._spin_s:
            until = time.perf_counter() + self._spin_s
            while not self.waiting and time.perf_counter() < until:
                pass
        return MessageHeader(*_HEAD.unpack(self.body(HEAD_BYTES)))

    @property
    def waiting(self) -> bool:
        """Something came, or the other end is closed."""
        return bool(select.select([self._end], [], [], 0)[0])

    def body(self, nbytes: int) -> bytes:
        """So many bytes of the body of the message whose head was read.

        Raises:
            EOFError: the other end is closed, or what it says cannot be.
        """
        if nbytes > _MOST_BODY:
            raise EOFError(f"a message of {nbytes} bytes")
        data = bytearray(nbytes)
        view, at = memoryview(data), 0
        while at < nbytes:
            try:
                count = self._end.recv_into(view[at:])
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError("the other end is closed")
            at += count
        self.received += nbytes
        return bytes(data)


def _wait(until: float) -> None:
    left = until - time.perf_counter()
    if left > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.perf_counter() < until:
        pass
