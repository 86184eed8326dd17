"""Temporal fusion: one generation step for all requests, and a lane of prompts beside it.

A request gets all the room it will ever need when it comes in, so none is ever preempted. Its
prompt is computed in the prompt lane: pieces of it go beside the steps of those that generate, as
many tokens a step as the lane is wide. A long prompt therefore slows generation by a known amount
and never stops it. With its first token the request joins the generation step. Those that have
ended leave it at once, and where the cache keeps requests dense (``kv = slots``) others move into
the holes before the next step.

Source: Yao et al., Flover: A Temporal Fusion Framework for Efficient Autoregressive Model Parallel
Inference, 2023. *Differs*: the prompt lane is a part of the same step, not a thread of its own, so
that what is computed when does not depend on timing.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Chunk, CompactingKVManager, KVManager, Preemption, SchedulerLimits, Step
from shoal.plan.batching.common import Queues


@part
class TemporalFusion:
    """Decode all running requests in each step, beside one chunk of the waiting prompts.

    Args:
        lane_tokens: largest number of prompt tokens in a step that also decodes; a step without
            decodes uses the full token budget.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"fixed_batches", "reads_no_clock"})
    lane_tokens: int = 128

    def __post_init__(self) -> None:
        require(
            self.lane_tokens >= 1,
            "scheduler.temporal_fusion.lane_tokens",
            self.lane_tokens,
            expected="at least 1, or prompts would wait until nobody generates",
        )

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> FusedScheduler:
        """See :class:`~shoal.ir.engine.SchedulerPart`; none is preempted, in no way."""
        return FusedScheduler(kv, limits, lane_tokens=self.lane_tokens)


class FusedScheduler(Queues):
    """The scheduler that :class:`TemporalFusion` builds.

    Args:
        lane_tokens: most tokens of prompts beside a generation step.
    """

    def __init__(self, kv: KVManager, limits: SchedulerLimits, *, lane_tokens: int) -> None:
        super().__init__(kv, limits)
        self.lane_tokens = lane_tokens

    def plan(self, now: float) -> Step:
        # Newcomers take the lowest holes, which no other has to be moved into then.
        self.admit_whole()
        moves = self.kv.compact() if isinstance(self.kv, CompactingKVManager) else ()
        most = self.limits.max_step_tokens
        running = self.running.values()
        chunks = [
            Chunk(request, request.n_computed, 1)
            for request in running
            if len(request.tokens) - request.n_computed == 1
        ][:most]
        lane = min(self.lane_tokens, most - len(chunks)) if chunks else most
        for request in running:
            left = len(request.tokens) - request.n_computed
            if left > 1 and lane > 0:
                chunks.append(Chunk(request, request.n_computed, min(left, lane)))
                lane -= min(left, lane)
        return Step(tuple(chunks), moves=moves, at=now)
