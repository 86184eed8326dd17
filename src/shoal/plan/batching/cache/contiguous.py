"""Contiguous cache: one run of tokens a request, as long as it can ever become.

How caches were kept before paging: room for the prompt and for ``max_tokens`` is set
aside on admission, whether it will be used or not, and nothing is shared. It never runs
out in the middle of a request. It is the baseline of ``paged``.

Source: Kwon et al., PagedAttention, 2023, section 3.1 (what it is compared with).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping

from shoal.core.parts import part
from shoal.ir import InFlight, Request
from shoal.plan.batching.common import BlockSize, whole_blocks


@part
class ContiguousCache:
    """Contiguous blocks for prompt and ``max_tokens``, allocated by first fit, not shared.

    Args:
        block_size: tokens of a block, the unit of allocation.
    """

    block_size: BlockSize = 16

    def build(self, num_tokens: int) -> ContiguousRuns:
        """See :class:`~shoal.ir.engine.KVPart`.

        Raises:
            ConfigError: not even one block.
        """
        return ContiguousRuns(whole_blocks(num_tokens, self.block_size), self.block_size)


class ContiguousRuns:
    """The bookkeeping that :class:`ContiguousCache` builds; a call costs O(free runs)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.in_flight = InFlight()
        # [first, after the last) of each free run, in order and never touching.
        self._free: list[tuple[int, int]] = [(0, num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks in free runs; a request needs them in one."""
        return self._num_free

    def match_prefix(self, request: Request) -> int:
        """Nothing is shared: always 0."""
        return 0

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """See :class:`~shoal.ir.engine.KVManager`; the first call sets all room aside."""
        size = self.block_size
        if request.blocks:
            return n_tokens <= len(request.blocks) * size
        most = max(n_tokens, request.n_prompt + request.params.max_tokens)
        # A request may name more than can be kept: its scheduler ends it at max_position.
        wanted = max(-(-n_tokens // size), min(-(-most // size), self.num_blocks))
        for place, (first, end) in enumerate(self._free):
            if end - first >= wanted:
                request.blocks = list(range(first, first + wanted))
                if end - first == wanted:
                    del self._free[place]
                else:
                    self._free[place] = (first + wanted, end)
                self._num_free -= wanted
                return True
        return False

    def computed(self, request: Request) -> None:
        """Nothing is shared: nothing to do."""

    def free(self, request: Request) -> None:
        request.n_computed = 0
        if not request.blocks:
            return
        first, end = request.blocks[0], request.blocks[-1] + 1
        self._num_free += end - first
        request.blocks = []
        place = bisect.bisect(self._free, (first, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == first:
            place -= 1
            first = self._free.pop(place)[0]
        self._free.insert(place, (first, end))

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held if it were alone."""
        return n_tokens <= self.num_blocks * self.block_size

    def stats(self) -> Mapping[str, float]:
        """``blocks_used``; no prefix is ever looked up."""
        return {
            "blocks_used": self.num_blocks - self._num_free,
            "prefix_hit_tokens": 0,
            "prefix_query_tokens": 0,
        }

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Compare the free runs with the requests that hold blocks; for tests.

        Raises:
            AssertionError: a block is lost, held twice, or runs are not in order.
        """
        places = [block for first, end in self._free for block in range(first, end)]
        assert len(places) == self._num_free, "wrong count of free blocks"
        for (_, end), (first, _) in zip(self._free, self._free[1:], strict=False):
            assert end < first, "free runs touch or are out of order"
        for request in requests.values():
            blocks = request.blocks
            assert blocks == list(range(blocks[0], blocks[0] + len(blocks))) if blocks else True
            places += blocks
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or held twice"
