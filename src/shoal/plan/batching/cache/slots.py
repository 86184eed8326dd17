"""Slot cache: each request has one place of ``max_len`` tokens, and the places in use are dense.

The alternative to paging for short answers of like length: keys and values of a request lie in
one piece, ``[slot, max_len, ...]``. When requests leave, those behind them move into the holes,
so that the slots in use are always the first ones: ``0 .. n - 1``. Only the part of a slot that
is used is copied, and no more slots than must be: a newcomer takes the lowest hole, and each hole
that is left below the new ``n`` takes the request of one slot above it.

Moves are decided before a step and made before anything of it is computed. They follow from the
step alone, so ranks that share a request's heads all make the same ones.

Source: Yao et al., Flover: A Temporal Fusion Framework for Efficient Autoregressive Model Parallel
Inference, 2023, section 4 (contiguous buffers, moves of finished requests).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Copy, InFlight, Request
from shoal.plan.batching.common import BlockSize


@part
class Slots:
    """One slot of ``max_len`` tokens per request; longer requests are rejected on arrival.

    Args:
        max_len: tokens of a slot: the longest prompt and output together.
        block_size: tokens of a block, the unit of reads and copies of a slot.
    """

    max_len: int = 512
    block_size: BlockSize = 16

    def __post_init__(self) -> None:
        require(
            self.max_len >= 1 and self.max_len % self.block_size == 0,
            "kv.slots.max_len",
            self.max_len,
            expected=f"a multiple of block_size = {self.block_size}",
        )

    def build(self, num_tokens: int) -> SlotBlocks:
        """See :class:`~shoal.ir.engine.KVPart`; rounded down to whole slots.

        Raises:
            ConfigError: not even one slot.
        """
        require(
            num_tokens >= self.max_len,
            "kv_tokens",
            num_tokens,
            expected=f"at least one slot of kv.slots.max_len = {self.max_len} tokens",
            hint="give the cache more tokens, or use shorter slots",
        )
        return SlotBlocks(num_tokens // self.max_len, self.max_len, self.block_size)


class SlotBlocks:
    """The bookkeeping that :class:`Slots` builds; a call costs O(log slots), or O(slots) to move.

    Args:
        max_len: tokens of a slot.
    """

    def __init__(self, num_slots: int, max_len: int, block_size: int) -> None:
        self.num_slots, self.max_len, self.block_size = num_slots, max_len, block_size
        self.num_blocks = num_slots * (max_len // block_size)
        self.in_flight = InFlight()
        # A heap: the lowest free slot first.
        self._free = list(range(num_slots))
        self._held: dict[int, Request] = {}
        self._moves = 0

    @property
    def num_free(self) -> int:
        """Blocks of free slots."""
        return len(self._free) * (self.max_len // self.block_size)

    def match_prefix(self, request: Request) -> int:
        """Nothing is shared: always 0."""
        return 0

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """See :class:`~shoal.ir.engine.KVManager`; the first call gives the lowest free slot."""
        if n_tokens > self.max_len:
            return False
        if request.blocks:
            return True
        if not self._free:
            return False
        self._give(request, heapq.heappop(self._free))
        return True

    def computed(self, request: Request) -> None:
        """Nothing is shared: nothing to do."""

    def free(self, request: Request) -> None:
        request.n_computed = 0
        if not request.blocks:
            return
        slot = self.slot_of(request)
        del self._held[slot]
        heapq.heappush(self._free, slot)
        request.blocks = []

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held: whether a slot is long enough."""
        return n_tokens <= self.max_len

    def slot_of(self, request: Request) -> int:
        """The slot of a request that has one."""
        return request.blocks[0] * self.block_size // self.max_len

    def compact(self) -> tuple[Copy, ...]:
        active = len(self._held)
        if not self._free or self._free[0] >= active:
            return ()
        holes = sorted(slot for slot in self._free if slot < active)
        above = sorted(slot for slot in self._held if slot >= active)
        moves: list[Copy] = []
        for source, target in zip(above, holes, strict=True):
            request = self._held.pop(source)
            first = request.blocks[0]
            self._give(request, target)
            used = -(-request.n_computed // self.block_size)
            if used:
                moves.append(Copy(first, request.blocks[0], used))
        self._free = list(range(active, self.num_slots))
        self._moves += len(moves)
        return tuple(moves)

    def stats(self) -> Mapping[str, float]:
        """``blocks_used``, ``slots_used`` and ``slot_moves``; no prefix is ever looked up."""
        return {
            "blocks_used": self.num_blocks - self.num_free,
            "slots_used": len(self._held),
            "slot_moves": self._moves,
            "prefix_hit_tokens": 0,
            "prefix_query_tokens": 0,
        }

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Compare the books with the requests that hold slots; for tests.

        Raises:
            AssertionError: a slot is lost, held twice or not in one piece.
        """
        width = self.max_len // self.block_size
        holding = {self.slot_of(one): one for one in requests.values() if one.blocks}
        assert holding == self._held, "a slot of a request that is gone, or with two of them"
        for slot, request in holding.items():
            assert request.blocks == list(range(slot * width, (slot + 1) * width)), "not one slot"
        assert sorted([*self._free, *holding]) == list(range(self.num_slots)), "a slot is lost"

    def _give(self, request: Request, slot: int) -> None:
        width = self.max_len // self.block_size
        self._held[slot] = request
        request.blocks = list(range(slot * width, (slot + 1) * width))
