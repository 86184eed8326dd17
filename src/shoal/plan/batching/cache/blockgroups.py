"""Block groups: blocks as units of the table, given out in long runs so that copies are few.

A request gets a group of consecutive blocks, more than it needs at first; what it does not
use yet is its spare. When the spare is used up, the run behind it joins the group if it is
free; else another group begins. When free runs are short, the spare of a running request
that is drawn at random is taken back. So a request wastes less than one block and a spare
that any request can have.

Nothing is shared between requests: a shared block lies in no run.

Source: Shen et al., FastSwitch, 2024, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Self

from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import InFlight, Machine, Request, ServeWork
from shoal.plan.batching.cache.runs import FreeRuns, joined
from shoal.plan.batching.common import BlockSize, whole_blocks


@part
class BlockGroups:
    """Blocks allocated in contiguous groups, with spare blocks that other requests can reclaim.

    Args:
        block_size: tokens of a block.
        init: initial number of blocks of a group.
        seed: seed of the choice of requests whose spare blocks are reclaimed.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"fixed_size_blocks", "takes_back"})
    block_size: BlockSize = 16
    init: Annotated[int, Ge(1)] = 60
    seed: int = 0

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where caches may be swapped often, by fewer copies."""
        part = cls()
        blocks = (work.job.kv_tokens or work.room) // part.block_size
        if work.crowded and work.one_rank and blocks >= part.init:
            yield part

    def build(self, num_tokens: int) -> GroupedBlocks:
        """See :class:`~shoal.ir.engine.KVPart`.

        Raises:
            ConfigError: not even one block, or fewer than one group.
        """
        number = whole_blocks(num_tokens, self.block_size)
        require(
            self.init <= number,
            "kv.blockgroups.init",
            self.init,
            expected=f"at most {number}, the blocks of the cache",
            hint="give the cache more kv_tokens, or use smaller groups",
        )
        return GroupedBlocks(number, self.block_size, self.init, seed=self.seed)


class GroupedBlocks:
    """The bookkeeping that :class:`BlockGroups` builds.

    A block is free, held by a request, spare after a request's last block, or cooling: freed during
    a transfer, and reused only if no other block is free.

    Args:
        group: blocks of a group.
        seed: seed of the choice of requests whose spare blocks are reclaimed.
    """

    def __init__(self, num_blocks: int, block_size: int, group: int, *, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.in_flight = InFlight()
        self._group = group
        self._free = FreeRuns(num_blocks)
        self._random = generator(seed, purpose="spare to take back")
        # Blocks behind the last one of a request; only requests that have some.
        self._spare: dict[str, int] = {}
        self._held: dict[str, Request] = {}
        self._cooling: list[tuple[int, int]] = []
        self._num_spare = self._num_cooling = 0
        self._reclaimed = 0

    @property
    def num_free(self) -> int:
        """Number of allocatable blocks: free, spare and cooling."""
        return self._free.total + self._num_spare + self._num_cooling

    def match_prefix(self, request: Request) -> int:
        """Nothing is shared: always 0."""
        return 0

    def allocate(self, request: Request, n_tokens: int) -> bool:
        missing = -(-n_tokens // self.block_size) - len(request.blocks)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        self._cool_down()
        self._held[request.id] = request
        blocks = request.blocks
        if blocks:
            missing -= self._grow(request, missing)
        while missing > 0:
            # Where space is short, no request gets a spare.
            short = self._free.total < missing
            if not self._free.total:
                self._take_back()
            first, count = self._free.take(missing if short else max(missing, self._group))
            used = min(missing, count)
            blocks.extend(range(first, first + used))
            missing -= used
            if count > used:
                self._keep_spare(request, count - used)
        return True

    def computed(self, request: Request) -> None:
        """Nothing is shared: nothing to do."""

    def free(self, request: Request) -> None:
        request.n_computed = 0
        self._give_spare(request)
        self._held.pop(request.id, None)
        for first, _, count in joined((block, block) for block in request.blocks):
            if self.in_flight and self.in_flight.touching(range(first, first + count)):
                self._cooling.append((first, count))
                self._num_cooling += count
            else:
                self._free.give(first, count)
        request.blocks = []

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held if it were alone."""
        return n_tokens <= self.num_blocks * self.block_size

    def stats(self) -> Mapping[str, float]:
        """``blocks_used`` without spares, ``blocks_spare``, ``spares_reclaimed``; no prefixes."""
        return {
            "blocks_used": self.num_blocks - self.num_free,
            "blocks_spare": self._num_spare,
            "spares_reclaimed": self._reclaimed,
            "prefix_hit_tokens": 0,
            "prefix_query_tokens": 0,
        }

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Compare all books with the requests that hold blocks; for tests.

        Raises:
            AssertionError: a block is lost or held twice, or two free runs touch.
        """
        self._free.check_integrity()
        places = self._free.blocks()
        for request in requests.values():
            places += request.blocks
            last = request.blocks[-1] if request.blocks else 0
            places += range(last + 1, last + 1 + self._spare.get(request.id, 0))
        for first, count in self._cooling:
            places += range(first, first + count)
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or held twice"
        assert self._num_spare == sum(self._spare.values()), "wrong count of spare blocks"
        assert self._num_cooling == sum(count for _, count in self._cooling)
        holding = {name for name, one in requests.items() if one.blocks}
        assert set(self._spare) <= set(self._held) == holding, "a book of a request that is gone"

    def _grow(self, request: Request, missing: int) -> int:
        """Extend a request's last group in place; how many of the ``missing`` blocks it got."""
        blocks = request.blocks
        spare = self._spare.pop(request.id, 0)
        self._num_spare -= spare
        last = blocks[-1] + 1
        if spare < missing:
            wanted = missing - spare
            spare += self._free.take_at(last + spare, max(wanted, self._group))
        used = min(missing, spare)
        blocks.extend(range(last, last + used))
        if spare > used:
            self._keep_spare(request, spare - used)
        return used

    def _keep_spare(self, request: Request, count: int) -> None:
        self._spare[request.id] = count
        self._num_spare += count

    def _give_spare(self, request: Request) -> None:
        count = self._spare.pop(request.id, 0)
        self._num_spare -= count
        if count:
            self._free.give(request.blocks[-1] + 1, count)

    def _take_back(self) -> None:
        """Free the spare of a request, or else what cools; there must be either."""
        if self._spare:
            names = list(self._spare)
            chosen = names[int(self._random.integers(len(names)))]
            self._give_spare(self._held[chosen])
            self._reclaimed += 1
        else:
            first, count = self._cooling.pop(0)
            self._num_cooling -= count
            self._free.give(first, count)

    def _cool_down(self) -> None:
        """Free what no transfer touches any more."""
        if not self._cooling:
            return
        cooling, self._cooling = self._cooling, []
        for first, count in cooling:
            if self.in_flight.touching(range(first, first + count)):
                self._cooling.append((first, count))
            else:
                self._num_cooling -= count
                self._free.give(first, count)
