"""Preemption by swapping or by recomputing, whichever is estimated to be faster.

Copying costs the way out, of what the host does not have yet, and the way back. Computing
again costs a step of as many tokens. The choice is made anew each time.

Source: Kwon et al., PagedAttention, 2023, section 7.3 (neither is always better).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from shoal.core.parts import part
from shoal.ir import Copy, HostLink, KVManager, Request, SchedulerLimits, StepCost
from shoal.plan.batching.cache.host import HostBlocks
from shoal.plan.batching.cache.runs import joined
from shoal.plan.batching.preemption.recompute import RecomputePreemption
from shoal.plan.batching.preemption.swap import Asynchronous, SwapPreemption, host_blocks


@part
class AutoPreempt:
    """Swap where copying is estimated to take less time than recomputation.

    Without host memory, or if either time is unknown, recompute.

    Args:
        asynchronous: whether requests run while another one is copied back: auto, always or never.
        keep_host_copies: keep the host copy after a request is back, so that the next preemption
            copies only new tokens.
        park: also copy the cache of a finished request to the host if that is faster than
            recomputation.
    """

    traits: ClassVar[frozenset[str]] = frozenset(
        {"chooses_by_price", "recomputes_cache", "swaps_cache"}
    )
    asynchronous: Asynchronous = "auto"
    keep_host_copies: bool = True
    park: bool = True

    def build(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        host_tokens: int = 0,
        link: HostLink | None = None,
        cost: StepCost | None = None,
    ) -> RecomputePreemption:
        """See :class:`~shoal.ir.engine.PreemptPart`.

        Raises:
            ConfigError: there is a host tier, and it is too small for one request.
        """
        if not host_tokens or link is None or cost is None:
            return RecomputePreemption(kv)
        return AutoPreemption(
            kv,
            HostBlocks(host_blocks(host_tokens, kv, limits), kv.block_size),
            asynchronous=self.asynchronous,
            keep=self.keep_host_copies,
            park=self.park,
            link=link,
            times=_Times(link, cost, limits.max_step_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """Estimated seconds of both ways.

    Args:
        link: how long copies take.
        cost: how long steps take.
        most: tokens of a step.
    """

    link: HostLink
    cost: StepCost
    most: int

    def computing(self, start: int, stop: int) -> float:
        """Seconds of computing tokens ``start .. stop`` again, in as few steps as possible."""
        cuts = [*range(start, stop, self.most), stop]
        return sum(
            self.cost.seconds(((low, high - low),)) for low, high in itertools.pairwise(cuts)
        )

    def copying(self, blocks: list[int]) -> float:
        """Seconds of copying these blocks of the cache, as if the host had them in one run."""
        copies: list[Copy] = list(joined((block, place) for place, block in enumerate(blocks)))
        return self.link.seconds(copies)


class AutoPreemption(SwapPreemption):
    """The preemption that :class:`AutoPreempt` builds where both ways are known.

    Args:
        kv: bookkeeping of the cache.
        asynchronous: see :class:`AutoPreempt`.
        keep: copies stay when their request is back.
        park: caches of requests that end go to the host.
        link: how long copies take.
        times: estimates of both ways.
    """

    def __init__(
        self,
        kv: KVManager,
        host: HostBlocks,
        *,
        asynchronous: Asynchronous,
        keep: bool,
        park: bool,
        link: HostLink,
        times: _Times,
    ) -> None:
        super().__init__(kv, host, asynchronous=asynchronous, keep=keep, park=park, link=link)
        self._times = times

    def worth_sending(self, request: Request) -> bool:
        """Whether out and back is faster than computing again."""
        filled = request.blocks[: -(-request.n_computed // self.kv.block_size)]
        sent = filled[self.host.covered(request) // self.kv.block_size :]
        both = self._times.copying(sent) + self._times.copying(filled)
        return both < self._times.computing(0, request.n_computed)

    def worth_fetching(self, request: Request, tokens: int) -> bool:
        """Whether the way back is faster than computing what it brings."""
        size = self.kv.block_size
        missing = request.blocks[request.n_computed // size : -(-tokens // size)]
        return self._times.copying(missing) < self._times.computing(request.n_computed, tokens)
