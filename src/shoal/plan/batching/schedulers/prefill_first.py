"""Prompts first: whole prompts in batches of their own, and decodes when no prompt waits.

How servers batched before prompts were cut: as soon as a request that waits fits the cache,
the next step computes prompts and nothing else, and every request that generates waits for it. The
first token comes soon; those after it come in fits and starts. A batch takes prompts in the
order of arrival up to a number of tokens; a longer prompt goes alone, and in parts if it is
longer than a step.

Sources: Kwon et al., PagedAttention, 2023 (the policy of vLLM then); Agrawal et al.,
Sarathi-Serve, 2024, section 3 (why it stalls generation).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from annotated_types import Ge, Le, Lt

from shoal.core.parts import part
from shoal.ir import (
    Chunk,
    KVManager,
    Machine,
    Preemption,
    Request,
    SchedulerLimits,
    ServeWork,
    Step,
)
from shoal.plan.batching.schedulers.fcfs import FcfsScheduler


@part
class PrefillFirst:
    """Steps that prefill whole prompts come before steps that decode.

    Args:
        batch_tokens: largest number of prompt tokens of a step; ``max_step_tokens`` if none.
        watermark: share of the cache that stays free when a request is admitted.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"prompts_apart", "reads_no_clock"})
    batch_tokens: Annotated[int, Ge(1), Le(2**24)] | None = None
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where requests come while others generate, whose first tokens would wait."""
        if work.over_time:
            yield cls()

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> PrefillFirstScheduler:
        return PrefillFirstScheduler(
            kv, limits, preemption, batch_tokens=self.batch_tokens, watermark=self.watermark
        )


class PrefillFirstScheduler(FcfsScheduler):
    """The scheduler that :class:`PrefillFirst` builds.

    Args:
        preemption: what becomes of a cache that is taken away.
        batch_tokens: most tokens of several prompts in one step.
        watermark: share of the cache to leave free on admission.
    """

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        preemption: Preemption | None = None,
        *,
        batch_tokens: int | None = None,
        watermark: float = 0.01,
    ) -> None:
        super().__init__(kv, limits, preemption, watermark=watermark)
        most = limits.max_step_tokens
        self._batch_tokens = most if batch_tokens is None else min(batch_tokens, most)

    def plan(self, now: float) -> Step:
        prompts: list[Chunk] = []
        budget = self._batch_tokens
        # A prompt that is longer than a step goes on where it was cut.
        for request in self.running.values():
            left = len(request.tokens) - request.n_computed
            if left > 1 and budget > 0 and request.state == "running":
                budget -= self._cut(prompts, request, left, budget, empty=True)
        self._admit(prompts, budget, empty=True)
        preempted: list[Request] = []
        chunks = prompts or self._decodes(preempted)
        return self._step(now, tuple(chunks), preempted, counted=not prompts)

    def _cut(
        self, prompts: list[Chunk], request: Request, left: int, budget: int, *, empty: bool
    ) -> int:
        """Take all of a prompt or nothing; one that no batch holds goes alone."""
        if left > budget and prompts:
            return 0
        length = min(left, self.limits.max_step_tokens)
        prompts.append(Chunk(request, request.n_computed, length))
        return length
