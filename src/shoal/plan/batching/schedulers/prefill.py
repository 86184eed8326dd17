"""The prefill phase: prompts in batches, and what they left in the cache until it is fetched.

An instance of this phase computes prompts and the first token of each, and nothing else. It
takes them in the order of arrival, several together up to the number of tokens from which a
step is bound by arithmetic; beyond it nothing is won by waiting for company, and a longer
prompt goes alone. A request that goes on after its first token is handed over: it is *held*,
with its blocks, until a decode instance has fetched them. So the memory of this phase is the
queue before the other one, and a burst of prompts cannot flood it.

Source: Zhong et al., DistServe, 2024, sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir import (
    Chunk,
    KVManager,
    Machine,
    Output,
    Request,
    SchedulerLimits,
    ServeWork,
    Step,
    StepResult,
)
from shoal.plan.batching.schedulers.prefill_first import PrefillFirstScheduler

# From so many tokens on, twice as many take nearly twice as long: nothing is won by waiting.
_LINEAR = 1.8


@part
class Prefill:
    """Prefill whole prompts in batches of limited tokens; their cache is kept until it is fetched.

    Args:
        batch_tokens: largest number of prompt tokens of a step; ``max_step_tokens`` if none.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"phase_prefill"})
    batch_tokens: Annotated[int, Ge(1), Le(2**24)] | None = None

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """With steps up to the tokens from which on arithmetic binds a prompt."""
        tokens, most, seconds = 32, work.job.max_step_tokens, work.cost.seconds
        while tokens < most and seconds([(0, 2 * tokens)]) < _LINEAR * seconds([(0, tokens)]):
            tokens *= 2
        yield cls(batch_tokens=min(tokens, most))

    def build(self, kv: KVManager, limits: SchedulerLimits) -> PrefillScheduler:
        """A scheduler without requests."""
        return PrefillScheduler(kv, limits, batch_tokens=self.batch_tokens)


class PrefillScheduler(PrefillFirstScheduler):
    """What :class:`Prefill` builds; see :class:`~shoal.ir.phases.PrefillPhaseScheduler`.

    Several steps may be under way at once, as in a pipeline: a prompt is planned once.

    Args:
        batch_tokens: most tokens of several prompts in one step.
    """

    def __init__(
        self, kv: KVManager, limits: SchedulerLimits, *, batch_tokens: int | None = None
    ) -> None:
        # Nothing grows here, so nothing has to stay free.
        super().__init__(kv, limits, batch_tokens=batch_tokens, watermark=0.0)
        self.held: dict[str, Request] = {}
        # In a step that was planned and is not committed.
        self._flying: set[str] = set()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks, those included that wait to be fetched."""
        return len(self.running) + len(self.held)

    def most_cached(self, request: Request) -> int:
        """Tokens of the prompt: what is generated lies elsewhere."""
        return request.n_prompt

    def plan(self, now: float) -> Step:
        prompts: list[Chunk] = []
        budget = self._batch_tokens
        # A prompt that is longer than a step goes on where it was cut.
        for request in self.running.values():
            if request.id not in self._flying and budget > 0:
                left = len(request.tokens) - request.n_computed
                budget -= self._cut(prompts, request, left, budget, empty=True)
        self._admit(prompts, budget, empty=True)
        self._flying.update(chunk.request.id for chunk in prompts)
        return Step(tuple(prompts))

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """See :class:`~shoal.ir.engine.Scheduler`; a request that goes on elsewhere is held."""
        self._flying.difference_update(chunk.request.id for chunk in step.chunks)
        outputs = super().commit(step, result, now)
        for output in outputs:
            if output.finish is None:
                self.held[output.request_id] = self.running.pop(output.request_id)
        return outputs

    def release(self, request_id: str) -> None:
        if request_id in self.held:
            self._forget(self.held[request_id], keep=False)

    def _forget(self, request: Request, *, keep: bool) -> None:
        self.held.pop(request.id, None)
        super()._forget(request, keep=keep)
