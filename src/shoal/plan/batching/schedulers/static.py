"""Static batches: no request joins until all have finished.

How batches were run before continuous batching: the first requests that wait are
admitted together, their prompts are computed, and then all of them advance one token a
step until the last one ends. It is the baseline of ``fcfs``. Here a request that has
ended costs nothing more, which padded batches cannot claim.

Source: Yu et al., Orca, 2022, section 2 (what it is compared with).
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.ir import Chunk, KVManager, Preemption, SchedulerLimits, Step
from shoal.plan.batching.common import Queues


@part
class Static:
    """Static batches of up to ``max_running`` requests; a batch ends before the next one starts.

    A batch takes the waiting requests, as many as the cache holds at their full lengths, so no
    request is preempted.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"fixed_batches", "reads_no_clock"})

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> StaticScheduler:
        """See :class:`~shoal.ir.engine.SchedulerPart`; none is preempted, in no way."""
        return StaticScheduler(kv, limits)


class StaticScheduler(Queues):
    """The scheduler that :class:`Static` builds."""

    def plan(self, now: float) -> Step:
        if not self.running:
            self.admit_whole()
        budget = self.limits.max_step_tokens
        chunks: list[Chunk] = []
        # All prompts first: a request that could generate waits for the others.
        ready = [request for request in self.running.values() if request.state == "running"]
        for request in ready:
            left = min(request.n_prompt - request.n_computed, budget)
            if left > 0:
                chunks.append(Chunk(request, request.n_computed, left))
                budget -= left
        if not chunks:
            # With more requests than a step has tokens, those behind go first.
            behind = sorted(ready, key=lambda request: request.n_generated)
            chunks = [Chunk(request, request.n_computed, 1) for request in behind[:budget]]
        return Step(tuple(chunks))
