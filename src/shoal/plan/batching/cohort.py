"""Decodes of a simulation that are counted together until something happens to one of them.

A request that generates asks nothing of its scheduler but a block now and then until its last
token is there, and a simulation asks nothing of it either: each step gives it token 0. So the step
is known beforehand at which it leaves, and until then a step moves a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.ir import Chunk, KVManager, Request


@dataclass(slots=True, eq=False)
class CountedDecode:
    """A request, the steps there had been when it joined, and those when it leaves, or is full."""

    request: Request
    since: int
    until: int
    full: int = 0


class Cohort:
    """Requests that compute one token in every step, and are brought up to date when they leave.

    Args:
        kv: bookkeeping of their cache.

    Attributes:
        members: by the ids of their requests.
        contexts: tokens that all of them have in the cache.
    """

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self.contexts = self._steps = 0
        self.members: dict[str, CountedDecode] = {}
        # By steps: those who leave with it, and those whose blocks are full after it.
        self._leaving: dict[int, list[CountedDecode]] = {}
        self._full: dict[int, list[CountedDecode]] = {}

    @property
    def full(self) -> Sequence[CountedDecode]:
        """Who needs another block for the next step."""
        return self._full.get(self._steps, ())

    def join(self, request: Request, steps: int) -> None:
        """Count a request, which has room for a token, for so many steps."""
        member = CountedDecode(request, self._steps, self._steps + steps)
        self.members[request.id] = member
        self._leaving.setdefault(member.until, []).append(member)
        self.contexts += request.n_computed
        self._fill(member)

    def grow(self) -> list[int]:
        """Give another block to those who need one; the new blocks, which there must be."""
        blocks: list[int] = []
        for member in self._full.pop(self._steps, ()):
            request, held = member.request, len(member.request.blocks)
            self._kv.allocate(request, request.n_computed + self._steps - member.since + 1)
            blocks += request.blocks[held:]
            self._fill(member)
        return blocks

    def leave(self, request_id: str) -> None:
        """Count a request no more, if it is a member."""
        member = self.members.pop(request_id, None)
        if member is not None:
            self._leaving[member.until].remove(member)
            self._full[member.full].remove(member)
            self._update(member)
            self._kv.computed(member.request)

    def advance(self) -> dict[str, Chunk]:
        """A step is over: by id, the chunks of those for whom it was the last one."""
        chunks = {}
        for member in self._leaving.pop(self._steps + 1, ()):
            request = member.request
            del self.members[request.id]
            self._full[member.full].remove(member)
            self._update(member)
            chunks[request.id] = Chunk(request, request.n_computed, 1)
        self._steps += 1
        self.contexts += len(self.members)
        return chunks

    def _fill(self, member: CountedDecode) -> None:
        request = member.request
        room = len(request.blocks) * self._kv.block_size - request.n_computed
        member.full = member.since + room
        self._full.setdefault(member.full, []).append(member)

    def _update(self, member: CountedDecode) -> None:
        request, steps = member.request, self._steps - member.since
        request.n_computed += steps
        request.tokens.extend([0] * steps)
        self.contexts -= request.n_computed
