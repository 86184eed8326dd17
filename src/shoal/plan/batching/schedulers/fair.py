"""Fair serving: priorities that change while requests run, so that each gets a turn.

Every ``1 / frequency`` steps each request is given a new priority by a policy. The most
important ones run; one that falls behind another that waits for room is preempted. How
cheap that is depends on the preemption and on the bookkeeping of the cache.

Policies: ``vtc`` counts the tokens that each session was served, and the least served comes
first. ``markov`` and ``uniform`` draw priorities, as workloads to measure switches with:
``markov`` keeps a session favoured or not for some updates, ``uniform`` draws anew.

Sources: Shen et al., FastSwitch, 2024, section 5.1 (patterns of priorities); Sheng et al.,
Fairness in Serving Large Language Models, 2024 (virtual token counter).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Lt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.ir import (
    KVManager,
    Machine,
    Output,
    Preemption,
    Request,
    SchedulerLimits,
    ServeWork,
    Step,
    StepResult,
)
from shoal.plan.batching.schedulers.fcfs import FcfsScheduler

Policy = Literal["vtc", "markov", "uniform"]

# What a token costs a session: a generated one takes a step, those of a prompt share one.
_PROMPT_WEIGHT, _OUTPUT_WEIGHT = 1.0, 2.0
# Chance that a session stays favoured, or not, at an update.
_STAYS = 0.8


@part
class Fair:
    """Run the requests with the highest priority; priorities are updated every few steps.

    Args:
        policy: vtc (least served session first), markov or uniform (random priorities).
        frequency: priority updates per step; 0 keeps the priorities of the requests.
        chunked: split prompts into chunks that fit a step.
        watermark: share of the cache that stays free when a request is admitted.
        seed: seed of the random priorities.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"reads_no_clock"})
    policy: Policy = "vtc"
    frequency: float = 0.02
    chunked: bool = True
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            0 <= self.frequency <= 1,
            "scheduler.fair.frequency",
            self.frequency,
            expected="updates a step in [0, 1]",
            hint="0.02 updates priorities every 50 steps",
        )

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """Where long requests keep short ones waiting, and others take their turns meanwhile."""
        if work.crowded:
            yield cls()

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> FairScheduler:
        return FairScheduler(
            kv,
            limits,
            preemption,
            policy=self.policy,
            period=round(1 / self.frequency) if self.frequency else 0,
            chunked=self.chunked,
            watermark=self.watermark,
            seed=self.seed,
        )


class FairScheduler(FcfsScheduler):
    """The scheduler that :class:`Fair` builds: ``fcfs`` with its queues in order of priority.

    Args:
        preemption: what becomes of a cache that is taken away.
        policy: see :class:`Fair`.
        period: steps between two updates; 0 for none.
        chunked: prompts may be cut.
        watermark: share of the cache to leave free on admission.
        seed: seed of the random priorities.
    """

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        preemption: Preemption | None = None,
        *,
        policy: Policy = "vtc",
        period: int = 50,
        chunked: bool = True,
        watermark: float = 0.01,
        seed: int = 0,
    ) -> None:
        super().__init__(kv, limits, preemption, chunked=chunked, watermark=watermark)
        self.policy, self.period, self.seed = policy, period, seed
        self._steps = 0
        # Place in the order of arrival, which breaks ties of priority.
        self._order: dict[str, int] = {}
        self._arrived = 0
        # By session: tokens served, weighted; or whether it is favoured.
        self._served: dict[str, float] = {}
        self._favoured: dict[str, bool] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self._order[request.id] = self._arrived
        self._arrived += 1
        if self.policy == "vtc" and self.period:
            self._lift(request)

    def count_decodes(self) -> None:
        """Nothing: each token counts for its session."""

    def plan(self, now: float) -> Step:
        if self.period and self._steps % self.period == 0:
            self._update()
        self.running = dict(sorted(self.running.items(), key=lambda one: self._rank(one[1])))
        self.waiting = deque(sorted(self.waiting, key=self._rank))
        return super().plan(now)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        if step.chunks:
            self._steps += 1
        outputs = super().commit(step, result, now)
        if self.policy == "vtc":
            for chunk in step.chunks:
                request = chunk.request
                prompt = max(0, min(chunk.stop, request.n_prompt) - chunk.start)
                new = len(result.tokens.get(request.id, ()))
                self._served[_session(request)] = (
                    self._served.get(_session(request), 0.0)
                    + _PROMPT_WEIGHT * prompt
                    + _OUTPUT_WEIGHT * new
                )
        return outputs

    def _rank(self, request: Request) -> tuple[float, int]:
        return request.priority, self._order[request.id]

    def _lift(self, request: Request) -> None:
        """A session that comes back has not saved up for the time it was away."""
        present = {_session(one) for one in self.requests.values() if one is not request}
        if _session(request) in present:
            return
        least = min((self._served.get(name, 0.0) for name in present), default=0.0)
        self._served[_session(request)] = max(self._served.get(_session(request), 0.0), least)
        request.priority = self._served[_session(request)]

    def _update(self) -> None:
        """Give every request its new priority; the smallest goes first."""
        requests = list(self.requests.values())
        sessions = dict.fromkeys(_session(request) for request in requests)
        if self.policy == "vtc":
            drawn = {name: self._served.get(name, 0.0) for name in sessions}
            least = min(drawn.values(), default=0.0)
            # Who is away and has less than all that are here is lifted to them on coming back.
            self._served = {
                name: served
                for name, served in self._served.items()
                if name in sessions or served > least
            }
        else:
            random = generator(self.seed, purpose="priorities", step=self._steps)
            drawn = dict(zip(sessions, random.random(len(sessions)).tolist(), strict=True))
            if self.policy == "markov":
                drawn = {name: self._switch(name, value) for name, value in drawn.items()}
                self._favoured = {name: not value for name, value in drawn.items()}
        for request in requests:
            request.priority = drawn[_session(request)]

    def _switch(self, session: str, drawn: float) -> float:
        """0 for a session that is favoured, 1 for one that is not."""
        before = self._favoured.get(session)
        if before is None:
            return float(drawn < 0.5)
        return float(before == (drawn >= _STAYS))

    def _displace(self) -> list[Request]:
        """Preempt the least important ones that run where a more important one waits.

        Only as many as fill this step: one that could not be computed in it displaces none.
        """
        displaced: list[Request] = []
        size, kv = self.kv.block_size, self.kv
        budget, promised = self.limits.max_step_tokens - len(self.running), 0
        room = self.limits.max_running - len(self.running)
        waiting: Sequence[Request] = tuple(self.waiting)
        for request in waiting:
            needed = promised + self._reserve - (-len(request.tokens) // size)
            while (needed > kv.num_free or room <= 0) and self.running:
                victim = next(reversed(self.running.values()))
                if victim.priority <= request.priority:
                    break
                self.lose(victim)
                displaced.append(victim)
                room += 1
            if needed > kv.num_free or room <= 0 or budget <= 0:
                break
            promised = needed - self._reserve
            room -= 1
            budget -= len(request.tokens) - self.preemption.kept(request)
        if displaced:
            self._refused = None
            self.waiting = deque(sorted(self.waiting, key=self._rank))
        return displaced

    def _forget(self, request: Request, *, keep: bool) -> None:
        super()._forget(request, keep=keep)
        del self._order[request.id]


def _session(request: Request) -> str:
    """Who it is served to; a request of no session is one of its own."""
    return request.session or f"\0{request.id}"
