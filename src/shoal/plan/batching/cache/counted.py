"""Paged bookkeeping in numbers of blocks, for simulations in which no two requests start alike.

No request finds blocks of another one then. It may find its own again, after it was
preempted: a block that it left keeps its tokens until the space is needed, those that were left
longest ago go first, and of one request the last ones. So it is enough to know how many are left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from shoal.ir import InFlight, Request


class CountedBlocks:
    """What :class:`~shoal.plan.batching.cache.paged.PagedBlocks` does; each call costs O(1).

    The numbers in ``request.blocks`` mean nothing, so nothing may be copied.

    Args:
        prefix_reuse: a preempted request goes on with what is left of its full blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.in_flight = InFlight()
        self._free = num_blocks
        # By id, the one that left first at the front: full blocks that it left; and their sum.
        self._left: OrderedDict[str, int] = OrderedDict()
        self._forgotten = 0
        # Full blocks of requests that hold some.
        self._full: dict[str, int] = {}
        # (found, asked) of requests that were matched and have not been given blocks yet.
        self._matched: dict[str, tuple[int, int]] = {}
        self._hits = self._queries = self._evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be given out, those that were left included."""
        return self._free + self._forgotten

    def match_prefix(self, request: Request) -> int:
        if request.blocks:
            raise ValueError(f"request {request.id} is matched while it holds blocks")
        if not self.prefix_reuse:
            return 0
        found = self._left.pop(request.id, 0)
        self._forgotten -= found
        request.blocks += [0] * found
        request.n_computed = found * self.block_size
        self._full[request.id] = found
        self._matched[request.id] = (request.n_computed, len(request.tokens))
        return request.n_computed

    def allocate(self, request: Request, n_tokens: int) -> bool:
        missing = -(-n_tokens // self.block_size) - len(request.blocks)
        if missing > self._free + self._forgotten:
            return False
        if missing > 0:
            self._free -= missing
            if self._free < 0:
                self._evict()
            request.blocks += [0] * missing
        if request.id in self._matched:
            found, asked = self._matched.pop(request.id)
            self._hits += found
            self._queries += asked
        return True

    def computed(self, request: Request) -> None:
        if self.prefix_reuse:
            self._full[request.id] = request.n_computed // self.block_size

    def free(self, request: Request) -> None:
        full = self._full.pop(request.id, 0)
        if full:
            self._left[request.id] = full
            self._forgotten += full
        self._free += len(request.blocks) - full
        request.blocks = []
        request.n_computed = 0
        self._matched.pop(request.id, None)

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held if it were alone."""
        return n_tokens <= self.num_blocks * self.block_size

    def stats(self) -> Mapping[str, float]:
        """``blocks_used``, ``prefix_hit_tokens``, ``prefix_query_tokens``, ``evictions``."""
        return {
            "blocks_used": self.num_blocks - self.num_free,
            "prefix_hit_tokens": self._hits,
            "prefix_query_tokens": self._queries,
            "evictions": self._evictions,
        }

    def _evict(self) -> None:
        """Take from those that left first what is missing."""
        while self._free < 0:
            name, left = next(iter(self._left.items()))
            taken = min(left, -self._free)
            self._left[name] = left - taken
            if taken == left:
                del self._left[name]
            self._free += taken
            self._forgotten -= taken
            self._evictions += taken
