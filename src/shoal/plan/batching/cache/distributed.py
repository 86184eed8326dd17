"""Distributed cache: the oldest blocks of long requests lie in the memory of other instances.

Each instance keeps these books: which of its blocks its own requests hold, which it lends, and
which blocks of others it may use. A request's table begins with blocks elsewhere (its oldest
tokens), goes on with blocks here, and its newest tokens are always here. Room that is not there
yet is promised: the end of a table may be :data:`UNBACKED` as long as other instances have
granted as many blocks. The engine's caller copies full blocks away (:meth:`~
DistributedBlocks.begin`), and when a copy is there the reference is switched
(:meth:`~DistributedBlocks.finish`): a block is never written while it is on its way.

No instance is asked from here: what others grant, take back or lose is passed to this class.

Source: Lin et al., Infinite-LLM, 2024, section 4.2 (rManager, rBlocks).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, Self

from annotated_types import Ge, Gt, Lt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Machine, Request, ServeWork
from shoal.plan.batching.cache.paged import PagedBlocks
from shoal.plan.batching.common import BlockSize, whole_blocks

# A block of a table that is promised: its memory comes when older ones have been copied away.
UNBACKED = -1

_BLOCK_BITS = 32


def reference(instance: int, block: int) -> int:
    """What stands in a table for a block of another instance; below :data:`UNBACKED`."""
    return -2 - (instance << _BLOCK_BITS | block)


def place_of(number: int) -> tuple[int, int]:
    """The instance and the block of a :func:`reference`."""
    whole = -2 - number
    return whole >> _BLOCK_BITS, whole & ((1 << _BLOCK_BITS) - 1)


@part
class Distributed:
    """Blocks on demand; the oldest blocks of long requests are in the memory of other instances.

    Args:
        instances: number of engines that lend each other memory, each with a cache of
            ``kv_tokens``; 1 to lend from the host only.
        block_size: tokens of a block.
        prefix_reuse: requests with a common prefix share its full blocks, as far as they are on
            this instance.
        watermark: share of an instance's own blocks that it does not lend.
        max_lenders: largest number of instances that hold blocks of one request.
        host_tokens: tokens of a lender that runs no requests: host memory, whose attention the
            host's cores compute; 0 for none.
        beat_s: s between two heartbeats of an instance.
        timeout_s: s without a heartbeat after which an instance is lost; longer than its longest
            step. An exited process is noticed at once.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"lends_blocks"})
    instances: Annotated[int, Ge(1)] = 2
    block_size: BlockSize = 16
    prefix_reuse: bool = True
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.05
    max_lenders: Annotated[int, Ge(1)] = 4
    host_tokens: int = 0
    beat_s: Annotated[float, Gt(0)] = 1.0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        require(
            self.host_tokens == 0 or self.host_tokens >= self.block_size,
            "kv.distributed.host_tokens",
            self.host_tokens,
            expected=f"0 for no such lender, or at least a block of {self.block_size}",
        )
        require(
            self.timeout_s >= 2 * self.beat_s,
            "kv.distributed.timeout_s",
            self.timeout_s,
            expected=f"at least two beats, {2 * self.beat_s:g} s",
        )

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where one device has no room for the longest request, and all of them have."""
        devices = machine.num_devices if machine.device.kind == "gpu" else 1
        free = work.room / (work.job.max_position or work.longest)
        if work.one_rank and work.job.kv_tokens is None and 1 / devices < free < 1:
            yield cls(instances=devices)

    @property
    def lenders(self) -> int:
        """Processes that hold blocks: the instances, and the host if it lends."""
        return self.instances + bool(self.host_tokens)

    def build(self, num_tokens: int) -> DistributedBlocks:
        """See :class:`~shoal.ir.engine.KVPart`: the books of one instance; no instance lends yet.

        Raises:
            ConfigError: not even one block.
        """
        blocks = whole_blocks(num_tokens, self.block_size)
        return DistributedBlocks(
            blocks,
            self.block_size,
            watermark=self.kept(blocks),
            max_lenders=self.max_lenders,
            prefix_reuse=self.prefix_reuse,
        )

    def kept(self, blocks: int) -> int:
        """Blocks of so many that an instance does not lend."""
        return -int(-self.watermark * blocks // 1)


class BlockLoan(NamedTuple):
    """A full block of a request that is copied to another instance.

    Args:
        id: of this copy.
        place: of the block in its table.
        block: where it is here.
        instance: where it goes.
        target: the block there.
    """

    id: int
    request: Request
    place: int
    block: int
    instance: int
    target: int


@dataclass(slots=True)
class _Loans:
    """What one request has elsewhere.

    Args:
        remote: blocks at the start of its table that are references.
        leaving: blocks after them whose copies are under way.
        lenders: instances that hold or get some -> how many.
    """

    remote: int
    leaving: int
    lenders: dict[int, int]


class DistributedBlocks(PagedBlocks):
    """The bookkeeping that :class:`Distributed` builds, for one instance.

    Args:
        watermark: blocks that are not lent.
        max_lenders: largest number of instances that hold blocks of one request.
        prefix_reuse: share full blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark: int = 0,
        max_lenders: int = 4,
        prefix_reuse: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_reuse=prefix_reuse)
        self.watermark, self.max_lenders = watermark, max_lenders
        # Blocks that the other instances would lend, as reported last.
        self.lendable = 0
        # Blocks that were missing when a request was last refused; 0 once one is let in.
        self.short = 0
        # Granted and not used yet: instance -> its blocks.
        self._credits: dict[int, list[int]] = {}
        self._num_credits = self._num_unbacked = 0
        self._loans: dict[str, _Loans] = {}
        # Those that hold blocks, by id, in the order in which they first did.
        self._holding: dict[str, Request] = {}
        self._flights: dict[int, BlockLoan] = {}
        # Copies under way whose request is gone: both blocks are given back when they end.
        self._orphans: set[int] = set()
        # Copies that have arrived before one that a request began earlier: they wait for it.
        self._arrived: set[int] = set()
        self._next = 0
        # No longer used here: instance -> its blocks, until they are given back.
        self._returns: dict[int, list[int]] = {}
        # Blocks of this instance that others use -> the user.
        self._lent: dict[int, int] = {}
        self._sent = 0

    # -- as every bookkeeping -----------------------------------------------------------

    @property
    def num_local(self) -> int:
        """Number of allocatable blocks of this instance."""
        return len(self._free) + len(self._forgotten)

    @property
    def num_free(self) -> int:
        """Number of allocatable blocks, including granted ones of other instances."""
        return self.num_local + self._num_credits - self._num_unbacked

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """See :class:`~shoal.ir.engine.KVManager`; what is not here yet is unbacked."""
        blocks = request.blocks
        missing = -(-n_tokens // self.block_size) - len(blocks)
        if missing > self.num_free:
            self.short = missing - self.num_free
            return False
        self.short = 0
        promised = bool(blocks) and blocks[-1] == UNBACKED
        for _ in range(missing):
            if promised or not self.num_local:
                promised = True
                self._num_unbacked += 1
                blocks.append(UNBACKED)
            else:
                blocks.append(self._take())
        self._holding[request.id] = request
        if request.id in self._matched:
            result, outcome = self._matched.pop(request.id)
            self._hits += result
            self._queries += outcome
        return True

    def fork(self, parent: Request, child: Request) -> int:
        """See :class:`~shoal.ir.engine.ForkingKVManager`: only full local blocks are shared.

        A block that two hold is not lent, and one that is elsewhere cannot be copied.
        """
        return self.match_prefix(child)

    def free(self, request: Request) -> None:
        """See :class:`~shoal.ir.engine.KVManager`; lent blocks are marked for return."""
        self._holding.pop(request.id, None)
        loans = self._loans.pop(request.id, None)
        if loans is not None:
            for number in request.blocks[: loans.remote]:
                instance, block = place_of(number)
                self._returns.setdefault(instance, []).append(block)
            for lend in [one for one in self._flights.values() if one.request is request]:
                self._orphans.add(lend.id)
                if lend.id in self._arrived:
                    self._arrived.remove(lend.id)
                    self.finish(lend)
            del request.blocks[: loans.remote + loans.leaving]
        while request.blocks and request.blocks[-1] == UNBACKED:
            request.blocks.pop()
            self._num_unbacked -= 1
        super().free(request)

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held, with all that others would lend."""
        return n_tokens <= (self.num_blocks + self.lendable) * self.block_size

    def stats(self) -> Mapping[str, float]:
        """Those of paged blocks, and ``blocks_lent``, ``blocks_borrowed``, ``blocks_moved``."""
        return {
            **super().stats(),
            "blocks_used": self.num_blocks - self.num_local,
            "blocks_lent": len(self._lent),
            "blocks_borrowed": sum(self.borrowed.values()),
            "blocks_moved": self._sent,
        }

    # -- as borrower --------------------------------------------------------------------

    @property
    def borrowed(self) -> dict[int, int]:
        """Blocks of each other instance on loan: used, granted or to be returned."""
        numbers: dict[int, int] = {}
        for held in (self._credits, self._returns):
            for instance, blocks in held.items():
                numbers[instance] = numbers.get(instance, 0) + len(blocks)
        for loans in self._loans.values():
            for instance, count in loans.lenders.items():
                numbers[instance] = numbers.get(instance, 0) + count
        for lend in self._flights.values():
            if lend.id in self._orphans:
                numbers[lend.instance] = numbers.get(lend.instance, 0) + 1
        return {instance: count for instance, count in numbers.items() if count}

    def credit(self, instance: int, blocks: Sequence[int]) -> None:
        """Another instance has granted these blocks."""
        if blocks:
            self._credits.setdefault(instance, []).extend(blocks)
            self._num_credits += len(blocks)

    def remote(self, request: Request) -> int:
        """Blocks at the start of a request's table that lie elsewhere."""
        loans = self._loans.get(request.id)
        return loans.remote if loans is not None else 0

    def back(self, request: Request, n_tokens: int) -> int:
        """Give promised blocks memory up to ``n_tokens``; how many tokens have some then."""
        blocks, need = request.blocks, -(-n_tokens // self.block_size)
        backed = len(blocks)
        while backed and blocks[backed - 1] == UNBACKED:
            backed -= 1
        while backed < need and self.num_local:
            blocks[backed] = self._take()
            self._num_unbacked -= 1
            backed += 1
        return min(n_tokens, backed * self.block_size)

    def begin(self, count: int, *, first: Request | None = None) -> list[BlockLoan]:
        """Choose up to ``count`` full blocks to copy away; the copies are under way from now on.

        Those of ``first`` go first, then of requests that already have some elsewhere, then of
        the longest: as few requests as can be are spread.
        """
        loans: list[BlockLoan] = []
        donors = sorted(
            self._holding.values(),
            key=lambda one: (one is not first, one.id not in self._loans, -one.n_computed),
        )
        for request in donors:
            while len(loans) < count and self._num_credits:
                lend = self._lend_one(request)
                if lend is None:
                    break
                loans.append(lend)
        return loans

    def _lend_one(self, request: Request) -> BlockLoan | None:
        loans = self._loans.get(request.id)
        index = loans.remote + loans.leaving if loans is not None else 0
        full = request.n_computed // self.block_size
        # The newest block stays, full or not.
        if index >= min(full, len(request.blocks) - 1):
            return None
        block = request.blocks[index]
        if block < 0 or self._holders[block] > 1:
            return None  # not computed here, or others read it, too
        used = loans.lenders if loans is not None else {}
        lenders = [one for one in used if self._credits.get(one)]
        if not lenders and len(used) < self.max_lenders:
            lenders = [one for one, blocks in self._credits.items() if blocks]
        if not lenders:
            return None
        instance = max(lenders, key=lambda one: (len(self._credits[one]), -one))
        target = self._credits[instance].pop()
        self._num_credits -= 1
        if loans is None:
            loans = self._loans[request.id] = _Loans(0, 0, {})
        loans.leaving += 1
        loans.lenders[instance] = loans.lenders.get(instance, 0) + 1
        lend = BlockLoan(self._next, request, index, block, instance, target)
        self._next += 1
        self._flights[lend.id] = lend
        return lend

    def finish(self, lend: BlockLoan) -> None:
        """A copy has arrived: the table says so, and the block here is free.

        Copies of one request may arrive in any order, as they go to several lenders; the table
        takes them in the order of its blocks. What was cancelled meanwhile is left alone.
        """
        if lend.id not in self._flights:
            return
        if lend.id in self._orphans:
            self._orphans.remove(lend.id)
            del self._flights[lend.id]
            self._leave(lend.block)
            self._returns.setdefault(lend.instance, []).append(lend.target)
            return
        self._arrived.add(lend.id)
        loans = self._loans[lend.request.id]
        waiting = {
            one.place: one
            for one in self._flights.values()
            if one.request is lend.request and one.id in self._arrived
        }
        while (one := waiting.get(loans.remote)) is not None:
            self._arrived.remove(one.id)
            del self._flights[one.id]
            self._leave(one.block)
            one.request.blocks[one.place] = reference(one.instance, one.target)
            loans.remote += 1
            loans.leaving -= 1
            self._sent += 1

    def spare(self, keep: int) -> None:
        """Grants beyond the promised blocks and ``keep`` free blocks are marked for return."""
        for instance in list(self._credits):
            while self._credits[instance] and self._num_credits > self._num_unbacked:
                if self.num_free <= keep:
                    return
                self._returns.setdefault(instance, []).append(self._credits[instance].pop())
                self._num_credits -= 1

    def returns(self) -> dict[int, list[int]]:
        """Blocks to return to other instances, which the call removes from this one."""
        returns, self._returns = self._returns, {}
        return returns

    def using(self, instance: int) -> list[Request]:
        """Requests that cannot go on without an instance, the newest first.

        A caller that takes an instance's blocks away frees these: they are computed again.
        """
        results = [one for one in self._holding.values() if instance in self._lenders_of(one)]
        return results[::-1]

    def recall(self, instance: int, blocks: int) -> list[Request]:
        """Requests to free so that an instance gets so many blocks back, the newest first.

        What is granted and not used goes back first.
        """
        left = blocks
        unused = self._credits.get(instance, [])
        while unused and left > 0 and self._num_credits > self._num_unbacked:
            self._returns.setdefault(instance, []).append(unused.pop())
            self._num_credits -= 1
            left -= 1
        results = []
        for request in self.using(instance):
            if left <= 0:
                break
            results.append(request)
            left -= self._loans[request.id].lenders[instance]
        return results

    @property
    def num_promised(self) -> int:
        """Blocks of tables that have no memory yet."""
        return self._num_unbacked

    def _lenders_of(self, request: Request) -> Collection[int]:
        loans = self._loans.get(request.id)
        return loans.lenders if loans is not None else ()

    def overdrawn(self) -> list[Request]:
        """Requests to free until every promise is covered, the newest first."""
        result, room = [], self.num_free
        for request in reversed(self._holding.values()):
            if room >= 0:
                break
            if request.blocks[-1] == UNBACKED:
                result.append(request)
                room += len(request.blocks)
        return result

    def lost(self, instance: int) -> None:
        """An instance is gone, and its blocks with it; none of them is in use any more."""
        self._num_credits -= len(self._credits.pop(instance, ()))
        self._returns.pop(instance, None)
        for lend in [one for one in self._flights.values() if one.instance == instance]:
            assert lend.id in self._orphans, "a request still uses an instance that is gone"
            self._orphans.remove(lend.id)
            del self._flights[lend.id]
            self._leave(lend.block)
        for block in [one for one, debtor in self._lent.items() if debtor == instance]:
            self.take_back(instance, [block])

    # -- as lender ----------------------------------------------------------------------

    @property
    def num_lendable(self) -> int:
        """Blocks that this instance would lend now."""
        if self._num_unbacked or self._num_credits or self._loans:
            return 0  # a borrower does not lend
        return max(0, self.num_local - self.watermark)

    @property
    def blocks_on_loan(self) -> dict[int, int]:
        """Blocks that each other instance uses here."""
        blocks: dict[int, int] = {}
        for debtor in self._lent.values():
            blocks[debtor] = blocks.get(debtor, 0) + 1
        return blocks

    def lend(self, debtor: int, wanted: int) -> list[int]:
        """Blocks for another instance: as many as it wants, or fewer, or none."""
        blocks = [self._take() for _ in range(min(wanted, self.num_lendable))]
        self._lent.update(dict.fromkeys(blocks, debtor))
        return blocks

    def lends(self, debtor: int, blocks: Sequence[int]) -> bool:
        """Whether another instance may use these blocks."""
        return all(self._lent.get(block) == debtor for block in blocks)

    def take_back(self, debtor: int, blocks: Sequence[int]) -> None:
        """Another instance gives blocks back; what is not lent to it is left alone."""
        for block in blocks:
            if self._lent.get(block) == debtor:
                del self._lent[block]
                self._leave(block)

    # -- for tests ----------------------------------------------------------------------

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Compare all books with the requests that hold blocks.

        Raises:
            AssertionError: a block is lost, counted wrongly or held where it must not be.
        """
        holders = [0] * self.num_blocks
        unbacked, theirs = 0, []
        for request in requests.values():
            blocks = request.blocks
            away, here = self.remote(request), len(blocks)
            while here and blocks[here - 1] == UNBACKED:
                here -= 1
            unbacked += len(blocks) - here
            assert all(number < UNBACKED for number in blocks[:away])
            assert all(number >= 0 for number in blocks[away:here]), "a hole in a table"
            theirs += [place_of(number) for number in blocks[:away]]
            assert away * self.block_size <= request.n_computed, "an empty block was lent"
            for block in blocks[away:here]:
                holders[block] += 1
            assert len(self._lenders_of(request)) <= self.max_lenders
        for block in self._lent:
            holders[block] += 1
        for lend in self._flights.values():
            theirs.append((lend.instance, lend.target))
            if lend.id in self._orphans:
                holders[lend.block] += 1
        assert holders == self._holders, "wrong reference counts"
        assert unbacked == self._num_unbacked, "promises were counted wrongly"
        for held in (self._credits, self._returns):
            theirs += [(instance, block) for instance, some in held.items() for block in some]
        assert len(set(theirs)) == len(theirs), "a block of another instance is used twice"
        counted: dict[int, int] = {}
        for instance, _ in theirs:
            counted[instance] = counted.get(instance, 0) + 1
        assert counted == self.borrowed, "debts were counted wrongly"
        assert sum(map(len, self._credits.values())) == self._num_credits
        used = {block for block, count in enumerate(holders) if count}
        places = [*self._free, *self._forgotten, *used]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert set(self._holding) == {one.id for one in requests.values() if one.blocks}
        assert set(self._loans) <= set(self._holding)
