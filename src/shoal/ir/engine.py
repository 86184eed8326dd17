"""Serving: what an engine is made of, as protocols.

The engine is a loop: a :class:`Scheduler` plans a :class:`~shoal.ir.serving.Step`, a
:class:`Runner` executes it, the scheduler commits its :class:`~shoal.ir.serving.StepResult`. The
simulator is the same loop with the same scheduler and the same :class:`KVManager`; only its runner
differs, which returns predicted seconds instead of computing. No scheduler reads a clock: the time
is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from shoal.ir.serving import (
    Copy,
    Fetched,
    HostLink,
    InFlight,
    Output,
    Request,
    SchedulerLimits,
    Step,
    StepResult,
    Transfer,
)


@runtime_checkable
class KVManager(Protocol):
    """Who holds which block of the cache: bookkeeping without tensors.

    ``in_flight`` is kept by who begins transfers. A manager may read it, to give out blocks
    that no transfer touches first; it must be right with any order.
    """

    block_size: int
    num_blocks: int
    in_flight: InFlight

    @property
    def num_free(self) -> int:
        """Number of allocatable blocks, including evictable prefixes."""

    def match_prefix(self, request: Request) -> int:
        """Give a request without blocks those that hold the start of its tokens.

        Sets ``blocks`` and ``n_computed``; at least the last token is left to compute.
        Returns the number of tokens found.
        """

    def allocate(self, request: Request, n_tokens: int) -> bool:
        """Make ``request.blocks`` hold ``n_tokens`` tokens; False, changing nothing, if full."""

    def computed(self, request: Request) -> None:
        """The first ``n_computed`` tokens are in the cache now; full blocks can be shared."""

    def free(self, request: Request) -> None:
        """Take all blocks away and set ``n_computed`` to 0."""

    def fits(self, n_tokens: int) -> bool:
        """Whether a request of ``n_tokens`` could be held if it were alone."""

    def stats(self) -> Mapping[str, float]:
        """Counters for metrics: ``blocks_used``, ``prefix_hit_tokens``, ``prefix_query_tokens``."""


@runtime_checkable
class ForkingKVManager(Protocol):
    """A :class:`KVManager` whose requests can share blocks that some of them will write to.

    A request that is about to write to a block that others hold too is given a copy of it, by
    ``allocate``.
    """

    def fork(self, parent: Request, child: Request) -> int:
        """Give a request without blocks those that hold its prompt, which its parent computed.

        Sets ``blocks`` and ``n_computed``; the last token of the prompt is left to compute.
        Returns the number of tokens found.
        """

    def copies(self) -> tuple[Copy, ...]:
        """Blocks to copy before anything is computed, since the last call."""


@runtime_checkable
class PurgingKVManager(Protocol):
    """Books that share blocks, and can forget what a block holds."""

    def purge(self, blocks: Sequence[int]) -> list[int]:
        """Forget what these blocks hold, of which nothing must be found again.

        Returns:
            Those that no request holds.
        """


@runtime_checkable
class CompactingKVManager(Protocol):
    """A :class:`KVManager` that keeps the requests it holds dense, in slots ``0 .. n - 1``."""

    max_len: int

    def compact(self) -> tuple[Copy, ...]:
        """Fill the holes below the number of requests with those above it.

        Changes their blocks. What is returned must be copied before anything is computed; no
        run is both read and written.
        """


@runtime_checkable
class Scheduler(Protocol):
    """Who runs now. Owns its requests and the bookkeeping of their blocks."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ServeError: it can never run: longer than ``max_position`` or than the cache.
        """

    def abort(self, request_id: str) -> Output | None:
        """Forget a request; None if there is none of that id (any more)."""

    def plan(self, now: float) -> Step:
        """What to compute next; an empty step if there is nothing to do."""

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take in what the step gave; requests aborted meanwhile are left out."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""


@runtime_checkable
class CountingScheduler(Scheduler, Protocol):
    """A :class:`Scheduler` that can count decodes instead of naming them: ``Step.decodes``."""

    def count_decodes(self) -> None:
        """Count them from now on; each gets token 0, and there is an output now and then."""


@runtime_checkable
class Preemption(Protocol):
    """Where the keys and values of a request go that has to give its blocks back.

    A scheduler asks it while it plans; it is the only one that begins transfers.
    """

    @property
    def moving(self) -> bool:
        """Whether copies between cache and host are planned or under way."""

    def take(self, request: Request) -> None:
        """Take the blocks of a running or arriving request, and keep what is in them or not."""

    def fetch(self, request: Request, running: int) -> Fetched:
        """Bring what the host holds of a request to its blocks, which hold all of its tokens.

        ``running`` others are in the step. ``ready``: a chunk of it may be planned. ``arriving``:
        not before it is ``running`` again. Both set ``n_computed``. ``busy``: computing in its
        blocks would make the others wait; take them away and try again later.
        """

    def wait(self, blocks: Sequence[int]) -> None:
        """These blocks are computed in by the step that is planned: it waits for what moves."""

    def drop(self, request: Request, *, keep: bool) -> None:
        """A request has ended: take its blocks; ``keep`` what later requests may begin with."""

    def kept(self, request: Request) -> int:
        """Tokens of a request that waits which need not be computed again."""

    def launch(
        self, now: float, *, computing: bool, busy: bool
    ) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        """``transfers`` and ``wait_for`` of the step that is planned.

        ``computing``: it has chunks. ``busy``: there are requests; if none of them computes,
        the step waits for a transfer.
        """

    def settle(self, done: Iterable[int], now: float) -> None:
        """These transfers are over; who was arriving by one of them is running."""


class PreemptPart(Protocol):
    """A part of kind ``preempt``."""

    def build(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        host_tokens: int = 0,
        link: HostLink | None = None,
        cost: StepCost | None = None,
    ) -> Preemption:
        """The preemption of one scheduler.

        Args:
            kv: its bookkeeping of the cache.
            limits: what it keeps to.
            host_tokens: tokens that host memory holds, rounded down to whole blocks.
            link: how long copies take, where that is known.
            cost: how long computing again takes, where that is known.
        """


class KVPart(Protocol):
    """A part of kind ``kv``."""

    def build(self, num_tokens: int) -> KVManager:
        """Bookkeeping for a cache of ``num_tokens`` tokens, rounded down to whole blocks."""


@runtime_checkable
class CountedKVPart(KVPart, Protocol):
    """A part of kind ``kv`` that can count blocks instead of naming them."""

    def build_counted(self, num_tokens: int) -> KVManager:
        """The same bookkeeping where no two requests start alike and nothing is copied."""


class SchedulerPart(Protocol):
    """A part of kind ``scheduler``."""

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> Scheduler:
        """A scheduler without requests; ``preemption`` is by recomputing if not given."""


class Runner(Protocol):
    """Who computes: a model on this machine, or a prediction."""

    def execute(self, step: Step) -> StepResult:
        """Compute a step; its keys and values go to the blocks of its requests."""


class QueuedRunner(Runner, Protocol):
    """A runner that takes steps before it has computed earlier ones.

    Attributes:
        depth: most steps under way.
    """

    depth: int

    def submit(self, step: Step) -> int:
        """Take a step to compute after those under way; returns its ticket without waiting."""

    def collect(self) -> StepResult:
        """What the oldest step under way gave, once it is there."""


class StepCost(Protocol):
    """Seconds of a step by its shape."""

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step of chunks (tokens before it, tokens in it)."""


@runtime_checkable
class CountedStepCost(StepCost, Protocol):
    """A :class:`StepCost` that asks no more of decodes than their sums."""

    def counted_seconds(
        self, chunks: Sequence[tuple[int, int]], decodes: int, contexts: int
    ) -> float:
        """The same of a step with so many decodes beside, after so many tokens together."""
