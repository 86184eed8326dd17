"""The decode phase: continuous batching of requests whose prompts were computed elsewhere.

A request comes with its first token; its keys and values still lie in the prefill instance. It
is *accepted* when its blocks fit here, and when those that are accepted and do not run yet hold
no more than a share of the cache; then the instance fetches the blocks, and with their
arrival the request runs. So this phase pulls, and what it cannot take stays where it is. When
the cache is full nevertheless, the youngest gives its blocks back and is computed again here.

Source: Zhong et al., DistServe, 2024, section 4.3.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from annotated_types import Ge, Gt, Le, Lt

from shoal.core.parts import part
from shoal.ir import KVManager, Machine, Output, Request, SchedulerLimits, ServeWork, Step
from shoal.plan.batching.schedulers.fcfs import FcfsScheduler


@part
class Decode:
    """Continuous batching of prefilled requests, fetched when the cache has space for them.

    Args:
        waiting_share: largest share of the cache for accepted requests that do not run yet.
        watermark: share of the cache that stays free when a request is accepted, for the growth of
            running requests.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"phase_decode"})
    waiting_share: Annotated[float, Gt(0), Le(1)] = 0.2
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """For every workload."""
        yield cls()

    def build(self, kv: KVManager, limits: SchedulerLimits) -> DecodeScheduler:
        """A scheduler without requests."""
        return DecodeScheduler(
            kv, limits, waiting_share=self.waiting_share, watermark=self.watermark
        )


class DecodeScheduler(FcfsScheduler):
    """What :class:`Decode` builds; see :class:`~shoal.ir.phases.DecodePhaseScheduler`.

    Args:
        waiting_share: of the cache, for accepted requests before they run.
        watermark: share of the cache to leave free on acceptance.
    """

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        waiting_share: float = 0.2,
        watermark: float = 0.01,
    ) -> None:
        super().__init__(kv, limits, chunked=True, watermark=watermark)
        self._most_waiting = waiting_share * kv.num_blocks
        # In the order of arrival: not accepted yet; being fetched; here, and not running yet.
        self.coming: deque[Request] = deque()
        self.fetching: dict[str, Request] = {}
        self.ready: dict[str, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self.coming) + len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running) + len(self.fetching) + len(self.ready)

    def add(self, request: Request) -> None:
        """See :class:`~shoal.ir.engine.Scheduler`; without a first token it is computed here."""
        super().add(request)
        if request.n_generated:
            self.coming.append(self.waiting.pop())

    def accept(self) -> list[Request]:
        accepted: list[Request] = []
        if not self.coming:
            return accepted
        kv = self.kv
        held = sum(len(one.blocks) for book in (self.fetching, self.ready) for one in book.values())
        # Who was preempted came before all that are still coming.
        while self.coming and not self.waiting:
            request = self.coming[0]
            needed = -(-len(request.tokens) // kv.block_size)
            if self.num_running and held + needed > self._most_waiting:
                break
            if not self._place(request, alone=not self.num_running):
                kv.free(request)
                break
            held += needed
            self.coming.popleft()
            request.state = "running"
            self.fetching[request.id] = request
            accepted.append(request)
        return accepted

    def arrived(self, request_id: str) -> None:
        request = self.fetching.pop(request_id, None)
        if request is None:
            return  # aborted while it was on its way
        request.n_computed = request.n_prompt
        self.kv.computed(request)
        self.ready[request_id] = request

    def plan(self, now: float) -> Step:
        while self.ready and len(self.running) < self.limits.max_running:
            request = self.ready.pop(next(iter(self.ready)))
            self.running[request.id] = request
        step = super().plan(now)
        if step.preempted and not step.num_requests and self.ready:
            # All that ran gave way to blocks of those that can run in their place.
            again = self.plan(now)
            return dataclasses.replace(again, preempted=(*step.preempted, *again.preempted))
        return step

    def abort(self, request_id: str) -> Output | None:
        request = self.requests.get(request_id)
        if request is not None and request in self.coming:
            self.coming.remove(request)
            self.waiting.append(request)  # where the others look for one that waits
        return super().abort(request_id)

    def _forget(self, request: Request, *, keep: bool) -> None:
        self.fetching.pop(request.id, None)
        self.ready.pop(request.id, None)
        super()._forget(request, keep=keep)
