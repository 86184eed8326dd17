"""Preemption by swapping: keys and values go to host memory and come back.

Copies run beside the computation. A request whose copy comes back is ``arriving``: others run
meanwhile. Blocks that are still being copied out are given to others at once, which wait for
that very transfer and for no other: a transfer that overwrites them starts after it, and a
step that computes in them waits for it.

Copies on the host survive the way back, so that the next time only new tokens are sent; see
:mod:`~shoal.plan.batching.cache.host`.

Source: Shen et al., FastSwitch, 2024, sections 4.2 and 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import (
    Copy,
    HostLink,
    KVManager,
    Machine,
    Request,
    SchedulerLimits,
    ServeWork,
    StepCost,
    Transfer,
)
from shoal.ir.serving import Fetched, TransferKind
from shoal.plan.batching.cache.host import HostBlocks
from shoal.plan.batching.cache.runs import joined
from shoal.plan.batching.common import whole_blocks
from shoal.plan.batching.preemption.recompute import RecomputePreemption

# never: nothing is computed while anything moves. auto: a copy comes back beside the
# computation, unless few requests run and it is there before the next step would be.
Asynchronous = Literal["auto", "always", "never"]


def host_blocks(host_tokens: int, kv: KVManager, limits: SchedulerLimits) -> int:
    """Blocks of so much host memory.

    Raises:
        ConfigError: they do not hold one request of full length.
    """
    longest = min(limits.max_position, kv.num_blocks * kv.block_size)
    require(
        host_tokens >= longest,
        "host_tokens",
        host_tokens,
        expected=f"at least {longest}, the tokens of the longest request",
        hint="give the host tier more tokens, or serve with a smaller max_position",
    )
    return whole_blocks(host_tokens, kv.block_size)


@part
class Swap:
    """Copy a preempted request's cache to the host; recompute it if the host has no space.

    Args:
        asynchronous: whether requests run while another one is copied back: auto, always or never.
        keep_host_copies: keep the host copy after a request is back, so that the next preemption
            copies only new tokens.
        park: also copy the cache of a finished request to the host; a later prompt with this
            prefix, such as the next turn of a conversation, fetches it.
        join: copy blocks that are consecutive on both sides at once.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"swaps_cache"})
    asynchronous: Asynchronous = "auto"
    keep_host_copies: bool = True
    park: bool = True
    join: bool = True

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where requests give their blocks back, and the host has a memory of its own."""
        if work.crowded and work.one_rank and machine.device.kind == "gpu":
            yield cls()

    def build(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        host_tokens: int = 0,
        link: HostLink | None = None,
        cost: StepCost | None = None,
    ) -> SwapPreemption:
        """See :class:`~shoal.ir.engine.PreemptPart`.

        Raises:
            ConfigError: the host tier is too small for one request.
        """
        host = HostBlocks(host_blocks(host_tokens, kv, limits), kv.block_size)
        return SwapPreemption(
            kv,
            host,
            asynchronous=self.asynchronous,
            keep=self.keep_host_copies,
            park=self.park,
            join=self.join,
            link=link,
        )


@dataclass(slots=True)
class _UnderWay:
    """A transfer that is not over: whose it is, and when its step was planned."""

    request: Request
    since: float


class SwapPreemption(RecomputePreemption):
    """The preemption that :class:`Swap` builds.

    Args:
        asynchronous: see :class:`Swap`.
        keep: copies stay when their request is back.
        park: caches of requests that end go to the host.
        join: copy runs of blocks at once.
        link: how long copies take; without it, they are taken to be long.
    """

    def __init__(
        self,
        kv: KVManager,
        host: HostBlocks,
        *,
        asynchronous: Asynchronous = "auto",
        keep: bool = True,
        park: bool = True,
        join: bool = True,
        link: HostLink | None = None,
    ) -> None:
        super().__init__(kv)
        self.host = host
        self.asynchronous, self.keep = asynchronous, keep
        self.park, self.join = park, join
        self.link = link
        self._next_id = 0
        self._planned: list[Transfer] = []
        self._waits: set[int] = set()
        self._under_way: dict[int, _UnderWay] = {}
        # Who is brought back, and by which transfer.
        self._arriving: dict[str, int] = {}
        self._launched: float | None = None
        self._step_s = 0.0

    @property
    def moving(self) -> bool:
        return bool(self._under_way)

    def take(self, request: Request) -> None:
        # Of one that is not back yet, the host has everything.
        if self._arriving.pop(request.id, None) is None and request.state == "running":
            self._send(request)
        self.kv.free(request)

    def fetch(self, request: Request, running: int) -> Fetched:
        size = self.kv.block_size
        self.host.adopt(request)
        tokens = min(self.host.covered(request), len(request.tokens) - 1)
        first = request.n_computed // size
        own = request.blocks[first:]
        if tokens <= request.n_computed or not self.worth_fetching(request, tokens):
            if running and self.kv.in_flight.touching(own) - self._waits:
                return "busy"
            self.wait(own)
            return "ready"
        # It goes on to compute in all of its blocks, so all of them must be left alone.
        transfer = self._begin(
            "in", request, self.host.blocks(request, first, tokens), own, touched=own
        )
        request.n_computed = tokens
        self._arriving[request.id] = transfer.id
        if self._at_once(transfer.copies, running):
            self._waits.update(transfer.after, (transfer.id,))
            return "ready"
        request.state = "arriving"
        return "arriving"

    def wait(self, blocks: Sequence[int]) -> None:
        self._waits |= self.kv.in_flight.touching(blocks)

    def drop(self, request: Request, *, keep: bool) -> None:
        self._arriving.pop(request.id, None)
        if keep and self.park:
            self._send(request)
            self.host.end(request)
        else:
            self.host.forget(request)
        self.kv.free(request)

    def kept(self, request: Request) -> int:
        return self.host.covered(request)

    def launch(
        self, now: float, *, computing: bool, busy: bool
    ) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        transfers = tuple(self._planned)
        self._planned.clear()
        for transfer in transfers:
            self._under_way[transfer.id].since = now
        waits = self._waits & self._under_way.keys()
        self._waits = set()
        if busy and not computing:
            waits = set(self._under_way)
        self._launched = now if computing else None
        return transfers, tuple(sorted(waits))

    def settle(self, done: Iterable[int], now: float) -> None:
        if self._launched is not None:
            self._step_s = now - self._launched
        for transfer in sorted(done):
            moved = self._under_way.pop(transfer)
            self.kv.in_flight.over(transfer)
            self.host.in_flight.over(transfer)
            request = moved.request
            request.switch_s += now - moved.since
            if self._arriving.get(request.id) != transfer:
                continue
            del self._arriving[request.id]
            if request.state == "arriving":
                request.state = "running"
                self.kv.computed(request)
            if not self.keep:
                self.host.forget(request)

    def worth_sending(self, request: Request) -> bool:
        """Whether to copy what a request has in the cache; else it is computed again."""
        return True

    def worth_fetching(self, request: Request, tokens: int) -> bool:
        """Whether to copy back what of ``tokens`` is not in the cache; else it is computed."""
        return True

    def check_integrity(self) -> None:
        """Check the books of the host; for tests.

        Raises:
            AssertionError: see :meth:`HostBlocks.check_integrity`.
        """
        self.host.check_integrity()
        assert self._arriving.items() <= {
            (moved.request.id, transfer) for transfer, moved in self._under_way.items()
        }, "somebody arrives by no transfer"

    def _send(self, request: Request) -> None:
        """Begin to copy what the host does not have yet, if there is room and it pays."""
        tokens = request.n_computed
        if tokens <= self.host.covered(request) or not self.worth_sending(request):
            return
        first = self.host.store(request, tokens)
        if first is None:
            return
        targets = self.host.blocks(request, first, tokens)
        sources = request.blocks[first : first + len(targets)]
        transfer = self._begin("out", request, sources, targets, touched=sources)
        if self.asynchronous == "never":
            self._waits.update(transfer.after, (transfer.id,))

    def _begin(
        self,
        kind: TransferKind,
        request: Request,
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        touched: Sequence[int],
    ) -> Transfer:
        """Plan to copy as many blocks as both sides have; ``touched`` are those of the cache."""
        pairs = tuple(zip(sources, targets, strict=False))
        copies = joined(pairs) if self.join else tuple(Copy(*pair, 1) for pair in pairs)
        host = [pair[0 if kind == "in" else 1] for pair in pairs]
        after = self.kv.in_flight.touching(touched) | self.host.in_flight.touching(host)
        transfer = Transfer(self._next_id, kind, request.id, copies, tuple(sorted(after)))
        self._next_id += 1
        self.kv.in_flight.begin(transfer.id, touched)
        self.host.in_flight.begin(transfer.id, host)
        self._planned.append(transfer)
        self._under_way[transfer.id] = _UnderWay(request, 0.0)
        return transfer

    def _at_once(self, copies: Sequence[Copy], running: int) -> bool:
        """Whether to compute nothing until these copies are there."""
        if self.asynchronous != "auto" or not running:
            return self.asynchronous != "always"
        if self.link is None:
            return False
        # All that run would stand still; the one that comes would miss a step.
        return self.link.seconds(copies) * running <= self._step_s
