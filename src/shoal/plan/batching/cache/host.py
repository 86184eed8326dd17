"""Books of host memory: which blocks of it hold copies of whose keys and values.

Keys and values of a token never change once they are computed. So a copy stays good while
its request runs on: it covers the tokens up to a mark, and the next time only blocks from
the mark on are sent. The block in which the mark lies is sent again. The copy of a request
that has ended is kept for a later one whose prompt begins with it, such as the next turn
of a conversation.

Copies of waiting requests are all there is of them. The others are spare: they give up
blocks from their end when there is no other room, those of ended requests first, then those
of the least important ones, the oldest first.

Source: Shen et al., FastSwitch, 2024, section 4.3 (reuse of copies in CPU memory).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.ir import InFlight, Request
from shoal.plan.batching.cache.runs import FreeRuns
from shoal.plan.batching.common import DigestChain


@dataclass(slots=True, eq=False)
class _Copied:
    """A copy of the first ``tokens`` tokens of a request, in ``blocks``.

    Args:
        age: rises with every copy that is begun.
        blocks: of the host, in order.
        tokens: the mark.
        digests: of its full blocks, when its request has ended.
    """

    request: Request | None
    age: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    digests: list[bytes] = field(default_factory=list)


class HostBlocks:
    """Who holds which block of host memory; the same for every bookkeeping of the cache.

    Args:
        num_blocks: blocks of host memory.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.in_flight = InFlight()
        self._free = FreeRuns(num_blocks)
        # Copies of requests that have not ended, by their ids.
        self._live: dict[str, _Copied] = {}
        # Copies of requests that have, the oldest first, as keys; and each by its digests.
        self._ended: dict[_Copied, None] = {}
        self._known: dict[bytes, _Copied] = {}
        self._age = 0

    @property
    def num_free(self) -> int:
        """Blocks in which nothing lies."""
        return self._free.total

    def covered(self, request: Request) -> int:
        """Tokens of a request that its copy covers."""
        copied = self._live.get(request.id)
        return copied.tokens if copied else 0

    def blocks(self, request: Request, first: int, tokens: int) -> list[int]:
        """Blocks ``first ..`` of its copy, up to the one of its last of ``tokens``."""
        return self._live[request.id].blocks[first : -(-tokens // self.block_size)]

    def store(self, request: Request, tokens: int) -> int | None:
        """Give a request's copy room for ``tokens``; the first block to send, None if full."""
        copied = self._live.get(request.id) or _Copied(request, self._age)
        missing = -(-tokens // self.block_size) - len(copied.blocks)
        if missing > self._free.total and not self._reclaim(missing, request):
            return None
        self._age += 1
        self._live[request.id] = copied
        while missing > 0:
            place = copied.blocks[-1] + 1 if copied.blocks else -1
            first, count = place, self._free.take_at(place, missing)
            if not count:
                first, count = self._free.take(missing, roomy=True)
            copied.blocks.extend(range(first, first + count))
            missing -= count
        dirty = copied.tokens // self.block_size
        copied.tokens = tokens
        return dirty

    def forget(self, request: Request) -> None:
        """Give up the copy of a request, if there is one."""
        copied = self._live.pop(request.id, None)
        if copied is not None:
            self._free.give_blocks(copied.blocks)

    def end(self, request: Request) -> None:
        """A request has ended: the full blocks of its copy are for others now."""
        copied = self._live.pop(request.id, None)
        if copied is None:
            return
        full = copied.tokens // self.block_size
        self._cut(copied, full)
        if not full:
            return
        copied.request = None
        copied.digests = [*DigestChain(request, self.block_size).upto(request, full)[:full]]
        self._ended[copied] = None
        self._known.update(dict.fromkeys(copied.digests, copied))

    def adopt(self, request: Request) -> None:
        """Give a request without a copy that of an ended one which it begins with, if any.

        A copy that is mostly something else is left alone: many prompts begin alike, and each
        would cut off what comes after.
        """
        if request.id in self._live or not self._known:
            return
        chain = DigestChain(request, self.block_size)
        most, alike = (len(request.tokens) - 1) // self.block_size, 0
        while alike < most and chain.upto(request, alike + 1)[alike] in self._known:
            alike += 1
        if not alike:
            return
        copied = self._known[chain.upto(request, alike)[alike - 1]]
        if 2 * alike < len(copied.blocks):
            return
        del self._ended[copied]
        self._forget_digests(copied, 0)
        self._cut(copied, alike)
        copied.request, copied.age = request, self._age
        self._age += 1
        self._live[request.id] = copied

    def check_integrity(self) -> None:
        """Compare all books with each other; for tests.

        Raises:
            AssertionError: a block is lost or held twice, or a mark lies outside its blocks.
        """
        self._free.check_integrity()
        copies = [*self._live.values(), *self._ended]
        held = [block for copied in copies for block in copied.blocks]
        places = sorted([*held, *self._free.blocks()])
        assert places == list(range(self.num_blocks)), "a host block is lost or held twice"
        for copied in copies:
            assert len(copied.blocks) == -(-copied.tokens // self.block_size)
        for copied in self._ended:
            assert copied.request is None
            assert len(copied.digests) == len(copied.blocks)
        assert set(self._known.values()) <= set(self._ended), "a digest of nobody"

    def _reclaim(self, wanted: int, asking: Request) -> bool:
        """Free blocks of spare copies until ``wanted`` are free."""
        running = [
            copied
            for copied in self._live.values()
            if copied.request is not asking
            and copied.request is not None
            and copied.request.state == "running"
        ]
        running.sort(key=lambda one: (-one.request.priority if one.request else 0.0, one.age))
        spare = [*self._ended, *running]
        if self._free.total + sum(len(copied.blocks) for copied in spare) < wanted:
            return False
        for copied in spare:
            missing = wanted - self._free.total
            if missing <= 0:
                break
            left = max(0, len(copied.blocks) - missing)
            if copied.request is None:
                self._forget_digests(copied, left)
            self._cut(copied, left)
            if not left and copied.request is None:
                del self._ended[copied]
            elif not left and copied.request is not None:
                del self._live[copied.request.id]
        return True

    def _cut(self, copied: _Copied, blocks: int) -> None:
        """Keep the first blocks of a copy."""
        self._free.give_blocks(copied.blocks[blocks:])
        del copied.blocks[blocks:]
        copied.tokens = min(copied.tokens, blocks * self.block_size)

    def _forget_digests(self, copied: _Copied, blocks: int) -> None:
        for digest in copied.digests[blocks:]:
            if self._known.get(digest) is copied:
                del self._known[digest]
        del copied.digests[blocks:]
