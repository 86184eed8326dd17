"""Paged cache: blocks of a few tokens, given out when they are needed, shared by prefix.

A request's tokens lie in blocks anywhere in the cache; only the last one is partly
empty. A full block is known by a digest chained over all tokens up to its end, so a later
request that starts with the same tokens uses the same block. A block that no request holds
keeps its tokens until the space is needed; the one that was left longest ago goes first.

Several answers to one prompt are forks: they hold all blocks of the prompt together, the last one
too, which is partly empty. Who writes to a block that others hold gets a copy of it first.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023, section 4 (copy-on-write: section 4.4).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.ir import Copy, InFlight, Machine, Request, ServeWork
from shoal.plan.batching.cache.counted import CountedBlocks
from shoal.plan.batching.common import BlockSize, DigestChain, whole_blocks


@part
class Paged:
    """Blocks allocated on demand, with reference counts and prefix reuse.

    Args:
        block_size: tokens of a block.
        prefix_reuse: requests with a common prefix share its full blocks.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"fixed_size_blocks", "takes_back"})
    block_size: BlockSize = 16
    prefix_reuse: bool = True

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """For every workload."""
        yield cls()

    def build(self, num_tokens: int) -> PagedBlocks:
        """See :class:`~shoal.ir.engine.KVPart`.

        Raises:
            ConfigError: not even one block.
        """
        return PagedBlocks(
            whole_blocks(num_tokens, self.block_size),
            self.block_size,
            prefix_reuse=self.prefix_reuse,
        )

    def build_counted(self, num_tokens: int) -> CountedBlocks:
        """See :class:`~shoal.ir.engine.CountedKVPart`.

        Raises:
            ConfigError: not even one block.
        """
        return CountedBlocks(
            whole_blocks(num_tokens, self.block_size),
            self.block_size,
            prefix_reuse=self.prefix_reuse,
        )


class PagedBlocks:
    """The bookkeeping that :class:`Paged` builds; each call costs O(1) a block.

    A block is free (nothing in it), forgotten (known by its digest, not held), or
    held by one request or several.

    Args:
        prefix_reuse: share full blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.in_flight = InFlight()
        # Popped from the end: low numbers first, and the last one freed is still in cache.
        # Those that a transfer still touches join at the other end.
        self._free = deque(range(num_blocks - 1, -1, -1))
        # Least recently left first.
        self._forgotten: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._known: dict[bytes, int] = {}
        # Digests of the full blocks of a request that holds some, as far as they were needed;
        # and how many of its blocks have been offered for sharing.
        self._chains: dict[str, DigestChain] = {}
        self._offered: dict[str, int] = {}
        # (found, asked) of requests that were matched and have not been given blocks yet.
        self._matched: dict[str, tuple[int, int]] = {}
        # Blocks to copy before the next step, by target.
        self._copies: dict[int, int] = {}
        self._hits = 0
        self._queries = 0
        self._evictions = 0
        self._forks = self._copied = 0

    @property
    def num_free(self) -> int:
        """Number of allocatable blocks, including evictable prefixes."""
        return len(self._free) + len(self._forgotten)

    def match_prefix(self, request: Request) -> int:
        if request.blocks:
            raise ValueError(f"request {request.id} is matched while it holds blocks")
        if not self.prefix_reuse:
            return 0
        # The last token is computed in any case: its output is the next token.
        most = (len(request.tokens) - 1) // self.block_size
        blocks = request.blocks
        for index in range(most):
            block = self._known.get(self._digests_of(request, index + 1)[index])
            if block is None:
                break
            if self._holders[block] == 0:
                del self._forgotten[block]
            self._holders[block] += 1
            blocks.append(block)
        request.n_computed = len(blocks) * self.block_size
        self._offered[request.id] = len(blocks)
        self._matched[request.id] = (request.n_computed, len(request.tokens))
        return request.n_computed

    def allocate(self, request: Request, n_tokens: int) -> bool:
        blocks, first = request.blocks, request.n_computed // self.block_size
        missing = -(-n_tokens // self.block_size) - len(blocks)
        shared = first < len(blocks) and self._holders[blocks[first]] > 1
        if missing + shared > len(self._free) + len(self._forgotten):
            return False
        if shared:
            self._holders[blocks[first]] -= 1
            copy = self._take()
            self._copies[copy] = blocks[first]
            blocks[first] = copy
        for _ in range(missing):
            blocks.append(self._take())
        if request.id in self._matched:
            result, outcome = self._matched.pop(request.id)
            self._hits += result
            self._queries += outcome
        return True

    def fork(self, parent: Request, child: Request) -> int:
        result = child.n_prompt - 1
        child.blocks = parent.blocks[: -(-result // self.block_size)]
        child.n_computed = result
        for block in child.blocks:
            self._holders[block] += 1
        full = result // self.block_size
        self._offered[child.id] = full
        self._forks += 1
        return result

    def copies(self) -> tuple[Copy, ...]:
        if not self._copies:
            return ()
        copies = tuple(Copy(source, target, 1) for target, source in self._copies.items())
        self._copied += len(copies)
        self._copies.clear()
        return copies

    def computed(self, request: Request) -> None:
        full = request.n_computed // self.block_size
        offered = self._offered.get(request.id, 0)
        if full == offered or not self.prefix_reuse:
            return
        digests = self._digests_of(request, full)
        known, digest_of = self._known, self._digests
        for digest, block in zip(digests[offered:full], request.blocks[offered:full], strict=True):
            # Another request may have computed the same tokens meanwhile; its block stays.
            if digest not in known:
                known[digest] = block
                digest_of[block] = digest
        self._offered[request.id] = full

    def free(self, request: Request) -> None:
        # The end of a prefix is of use to fewer requests than its start: it goes first.
        holders, digest_of, forgotten = self._holders, self._digests, self._forgotten
        for block in reversed(request.blocks):
            if holders[block] == 1 and digest_of[block] is not None and not self._copies:
                holders[block] = 0
                forgotten[block] = None
            else:
                self._leave(block)
        request.blocks = []
        request.n_computed = 0
        for book in (self._chains, self._offered, self._matched):
            book.pop(request.id, None)

    def purge(self, blocks: Sequence[int]) -> list[int]:
        results = []
        for block in blocks:
            if not 0 <= block < self.num_blocks or self._holders[block]:
                continue
            digest = self._digests[block]
            if digest is not None:
                del self._known[digest], self._forgotten[block]
                self._digests[block] = None
                self._free.append(block)
            results.append(block)
        return results

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held if it were alone."""
        return n_tokens <= self.num_blocks * self.block_size

    def stats(self) -> Mapping[str, float]:
        """``blocks_used``, ``prefix_hit_tokens``, ``prefix_query_tokens``, ``evictions``.

        ``forks`` are requests that began with the blocks of another, ``blocks_copied`` the blocks
        that were copied because of it.
        """
        return {
            "blocks_used": self.num_blocks - self.num_free,
            "prefix_hit_tokens": self._hits,
            "prefix_query_tokens": self._queries,
            "evictions": self._evictions,
            "forks": self._forks,
            "blocks_copied": self._copied,
        }

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Compare all books with the requests that hold blocks; for tests.

        Raises:
            AssertionError: a block is lost, counted wrongly or held where it must not be.
        """
        holders = [0] * self.num_blocks
        for request in requests.values():
            assert len(set(request.blocks)) == len(request.blocks), "held twice by one request"
            for block in request.blocks:
                holders[block] += 1
            # Whatever a request may still write to is its own.
            for block in request.blocks[request.n_computed // self.block_size :]:
                assert holders[block] == self._holders[block] == 1, "a block with two writers"
                assert self._digests[block] is None, "a shared block can be written"
        assert holders == self._holders, "wrong reference counts"
        held = {block for block, count in enumerate(holders) if count}
        places = [*self._free, *self._forgotten, *held]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert all(self._digests[block] is None for block in self._free)
        assert all(self._digests[block] is not None for block in self._forgotten)
        known = {digest: b for b, digest in enumerate(self._digests) if digest is not None}
        assert known == self._known, "a digest without its block"
        for book in (self._chains, self._offered, self._matched):
            assert set(book) <= set(requests), "a book of a request that is gone"
        assert set(self._copies) <= held, "a block is copied for nobody"

    def _take(self) -> int:
        """A block for one holder; there must be one that can be given out."""
        block = self._free.pop() if self._free else self._evict()
        self._holders[block] = 1
        return block

    def _leave(self, block: int) -> None:
        """One holder less."""
        self._holders[block] -= 1
        if self._holders[block]:
            return
        self._copies.pop(block, None)
        if self._digests[block] is not None:
            self._forgotten[block] = None
        elif block in self.in_flight:
            self._free.appendleft(block)
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._forgotten.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._known[digest]
        self._digests[block] = None
        self._evictions += 1
        return block

    def _digests_of(self, request: Request, blocks: int) -> Sequence[bytes]:
        """See :meth:`~shoal.plan.batching.common.DigestChain.upto`."""
        chain = self._chains.get(request.id)
        if chain is None:
            chain = self._chains[request.id] = DigestChain(request, self.block_size)
        return chain.upto(request, blocks)
