"""Serving in virtual time: the engine's loop with a predicted step instead of a computed one.

The scheduler is the very object that the engine drives. The clock stands still while it
plans, moves by the predicted seconds of a step, and jumps to the next arrival when there
is nothing to do.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.core.errors import ServeError, require
from shoal.ir import (
    Arrival,
    Chunk,
    CountedStepCost,
    CountingScheduler,
    HostLink,
    Output,
    Prompt,
    Request,
    Runner,
    SamplingParams,
    Scheduler,
    Step,
    StepCost,
    StepResult,
)


@dataclass(slots=True)
class ServedRequest:
    """What happened to one request, in s on one clock.

    Args:
        arrival: when it came.
        first: when its first token was there.
        finish: when its last token was there.
        n_output: tokens it was given.
        n_cached: tokens of the prompt that were found in the cache.
        preemptions: how often its cache was taken away.
        switch_s: s in which its cache was on the way to the host or back.
    """

    id: str
    arrival: float
    n_prompt: int
    first: float = math.nan
    finish: float = math.nan
    n_output: int = 0
    n_cached: int = 0
    preemptions: int = 0
    switch_s: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to the first token, s."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Time per output token after the first, s; not a number for a single token."""
        return (self.finish - self.first) / (self.n_output - 1) if self.n_output > 1 else math.nan


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a simulation.

    Args:
        requests: how many had a part in it.
        tokens: how many it computed.
        preempted: how many lost their blocks.
    """

    at: float
    seconds: float
    requests: int
    tokens: int
    preempted: int


@dataclass
class Simulation:
    """What a simulation saw.

    Args:
        served: every request, in the order of arrival.
        steps: every step, of an engine.
        busy_s: s in which it computed, or each of several on average.
    """

    served: list[ServedRequest] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    busy_s: float = 0.0

    def quantities(self) -> dict[str, float]:
        """See :func:`quantities`."""
        return quantities(self.served)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Gain and cost of speculative decoding.

    Args:
        tokens: expected tokens per step of one request with 0, 1, ... nodes.
        guess_s: s of drafting per step.
    """

    tokens: tuple[float, ...]
    guess_s: float


class SimulatedRunner:
    """A runner that computes nothing: it takes the predicted time and gives token 0.

    Transfers go over a link with a lane for each direction, one after another, beside the
    computation; a step that waits for transfers takes correspondingly longer.

    Args:
        link: of transfers; there must be none without it.
        speculation: gain and cost of speculative decoding; None without.
    """

    def __init__(
        self,
        cost: StepCost,
        link: HostLink | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._cost, self._link, self._speculation = cost, link, speculation
        self._counted = cost if isinstance(cost, CountedStepCost) else None
        self._owed: dict[str, float] = {}  # by request: the part of a token expected so far
        self._lanes: dict[str, float] = {}
        # When each transfer that has not been reported is over, s on the clock of the steps.
        self._ends: dict[int, float] = {}

    def let_count(self, scheduler: Scheduler) -> None:
        """Let a scheduler count decodes, if it can and nothing here asks for their names."""
        if self._counted and not self._speculation and isinstance(scheduler, CountingScheduler):
            scheduler.count_decodes()

    def execute(self, step: Step) -> StepResult:
        """See :class:`~shoal.ir.engine.Runner`.

        Raises:
            ServeError: something is copied, and there is no link.
        """
        if not (step.transfers or step.wait_for or self._ends):
            tokens, guessed = self._tokens(step), self._guessed(step)
            return StepResult(tokens, seconds=self._seconds(step), guessed=guessed)
        self._begin(step)
        waits = [self._ends[one] for one in step.wait_for]
        computes = step.num_requests
        begins = max(step.at, (max if computes else min)(waits, default=step.at))
        ends = begins + (self._seconds(step) if computes else 0.0)
        done = frozenset(one for one, over in self._ends.items() if over <= ends)
        for one in done:
            del self._ends[one]
        tokens, guessed = self._tokens(step), self._guessed(step)
        return StepResult(tokens, seconds=ends - step.at, done=done, guessed=guessed)

    def _begin(self, step: Step) -> None:
        for transfer in step.transfers:
            if self._link is None:
                raise ServeError(
                    f"transfer {transfer.id} of request {transfer.request_id}: this simulation "
                    "has no link to copy over; give it one, or preempt by recomputing"
                )
            free = self._lanes.get(transfer.kind, 0.0)
            # One that is not known any more is over.
            begins = max(step.at, free, *(self._ends.get(one, 0.0) for one in transfer.after))
            ends = begins + self._link.seconds(transfer.copies)
            self._lanes[transfer.kind] = self._ends[transfer.id] = ends

    def _seconds(self, step: Step) -> float:
        rows = [chunk[1:3] for chunk in step.chunks]
        if step.decodes:
            assert self._counted is not None
            return self._counted.counted_seconds(rows, step.decodes, step.contexts)
        if self._speculation is None:
            return self._cost.seconds(rows)
        guessing = [chunk for chunk in step.chunks if chunk.drafts]
        rows += [(chunk.start, 1) for chunk in guessing for _ in range(chunk.drafts)]
        return self._cost.seconds(rows) + (self._speculation.guess_s if guessing else 0.0)

    def _tokens(self, step: Step) -> dict[str, tuple[int, ...]]:
        if self._speculation is None:
            names = [r.id for r, start, length, _ in step.chunks if start + length == len(r.tokens)]
            return dict.fromkeys(names, _ONE)
        return {
            chunk.request.id: (0,) * self._given(chunk) if chunk.drafts else _ONE
            for chunk in step.chunks
            if chunk.yields
        }

    def _given(self, chunk: Chunk) -> int:
        """As many tokens as are expected, in whole ones; what is left over comes later."""
        assert self._speculation is not None
        expected = self._speculation.tokens
        owed = (
            self._owed.get(chunk.request.id, 0.0) + expected[min(chunk.drafts, len(expected) - 1)]
        )
        given = int(owed)
        self._owed[chunk.request.id] = owed - given
        return given

    def _guessed(self, step: Step) -> dict[str, int]:
        if self._speculation is None:
            return {}
        return {chunk.request.id: chunk.drafts for chunk in step.chunks if chunk.drafts}


_ONE = (0,)


@functools.cache
def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def request_of(name: str, arrival: Arrival) -> Request:
    """The request of an arrival: greedy, with exactly its number of output tokens."""
    return Request(
        name,
        list(arrival.prompt),
        len(arrival.prompt),
        _greedy(arrival.output_tokens),
        arrival=arrival.at,
        session=arrival.session,
        prompt=arrival.prompt if isinstance(arrival.prompt, Prompt) else None,
    )


def simulate(
    scheduler: Scheduler,
    cost: StepCost,
    arrivals: Sequence[Arrival],
    *,
    link: HostLink | None = None,
    speculation: Speculation | None = None,
    runner: Runner | None = None,
) -> Simulation:
    """Serve ``arrivals`` in virtual time.

    Args:
        scheduler: one without requests; it has none afterwards.
        cost: seconds of a step.
        arrivals: what comes, in the order of time.
        link: between cache and host; needed where the scheduler swaps.
        speculation: what guesses give and take; needed where the scheduler lets decodes guess.
        runner: says what steps give and take; one token each by ``cost``, if not given.

    Raises:
        ServeError: a request that can never run.
        ConfigError: arrivals that are not in the order of time.
    """
    if runner is None:
        runner = SimulatedRunner(cost, link, speculation)
        runner.let_count(scheduler)
    seen = Simulation()
    live: dict[str, tuple[Request, ServedRequest]] = {}
    now, place, total = 0.0, 0, len(arrivals)
    for index in range(1, total):
        require(
            arrivals[index].at >= arrivals[index - 1].at,
            f"arrivals[{index}].at",
            arrivals[index].at,
            expected=f"at least {arrivals[index - 1].at}, the time of the one before",
            hint="sort the trace by time",
        )
    while place < total or live:
        while place < total and arrivals[place].at <= now:
            arrival = arrivals[place]
            request = request_of(str(place), arrival)
            scheduler.add(request)
            served = ServedRequest(request.id, arrival.at, request.n_prompt)
            seen.served.append(served)
            live[request.id] = request, served
            place += 1
        step = scheduler.plan(now)
        if not step:
            if place == total:
                break
            now = arrivals[place].at
            continue
        result = runner.execute(step)
        tokens, preempted = step.num_tokens, len(step.preempted)
        seen.steps.append(StepRecord(now, result.seconds, step.num_requests, tokens, preempted))
        seen.busy_s += result.seconds
        now += result.seconds
        for output in scheduler.commit(step, result, now):
            request, served = live[output.request_id]
            _note(served, request, output, now)
            if output.finish is not None:
                del live[output.request_id]
    return seen


class StepPlanner(Protocol):
    """Plans while steps are under way, and commits in order: ``plan.batching.ahead.Ahead``."""

    depth: int

    def plan(self, now: float) -> Step:
        """The next step, or an empty one."""

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take in what the oldest step gave."""


def simulate_ahead(
    scheduler: Scheduler,
    ahead: StepPlanner,
    cost: StepCost,
    arrivals: Sequence[Arrival],
    *,
    stages: int,
) -> Simulation:
    """Serve ``arrivals`` in virtual time by a pipeline, as its engine does.

    Steps are planned until as many are under way as there may be. Each begins in a stage when
    the one before it has left that stage, and is in each for an equal share of its seconds.

    Args:
        scheduler: where requests are added; without any.
        ahead: the same scheduler, planning ahead.
        cost: seconds of a step through all stages.
        arrivals: what comes, in the order of time.
        stages: of the pipeline.

    Raises:
        ServeError: a request that can never run, or something is swapped.
    """
    runner = SimulatedRunner(cost)
    seen = Simulation()
    live: dict[str, tuple[Request, ServedRequest]] = {}
    under_way: deque[tuple[float, Step, StepResult]] = deque()
    free = [0.0] * stages
    now, place = 0.0, 0
    while place < len(arrivals) or live:
        while place < len(arrivals) and arrivals[place].at <= now:
            request = request_of(str(place), arrivals[place])
            scheduler.add(request)
            served = ServedRequest(request.id, arrivals[place].at, request.n_prompt)
            seen.served.append(served)
            live[request.id] = request, served
            place += 1
        while len(under_way) < ahead.depth and (step := ahead.plan(now)):
            result = runner.execute(step)
            end = now
            for stage, until in enumerate(free):
                end = free[stage] = max(end, until) + result.seconds / stages
            tokens, preempted = step.num_tokens, len(step.preempted)
            seen.steps.append(StepRecord(now, result.seconds, len(step.chunks), tokens, preempted))
            seen.busy_s += result.seconds / stages
            under_way.append((end, step, result))
        if not under_way:
            if place == len(arrivals):
                break
            now = arrivals[place].at
            continue
        # A request that comes while steps are under way may join the next one, if it has room.
        soon = arrivals[place].at if place < len(arrivals) else math.inf
        if len(under_way) < ahead.depth and soon < under_way[0][0]:
            now = soon
            continue
        now, step, result = under_way.popleft()
        for output in ahead.commit(step, result, now):
            request, served = live[output.request_id]
            _note(served, request, output, now)
            if output.finish is not None:
                del live[output.request_id]
    return seen


def stretched(seen: Simulation, factor: float, *, stages: int = 1) -> list[ServedRequest]:
    """What the requests got, had every step taken ``factor`` times as long.

    The same as simulating them again, to the last digit, and in a fraction of the time.

    Args:
        seen: where no step waited for an arrival or for a transfer.
        factor: of the seconds of a step.
        stages: of the pipeline that it was.
    """
    # Every time in it is the start or the end of a step.
    times = {0.0: 0.0, math.nan: math.nan}
    before, after = [0.0] * stages, [0.0] * stages
    for step in seen.steps:
        end, end_here = step.at, times[step.at]
        share, share_here = step.seconds / stages, factor * step.seconds / stages
        for stage in range(stages):
            end = before[stage] = max(end, before[stage]) + share
            end_here = after[stage] = max(end_here, after[stage]) + share_here
        times[end] = end_here
    return [replace(one, first=times[one.first], finish=times[one.finish]) for one in seen.served]


def _note(served: ServedRequest, request: Request, output: Output, now: float) -> None:
    """What a request got ``now``."""
    if served.n_output == 0:
        served.first, served.n_cached = now, request.n_cached
    served.n_output = request.n_generated
    if output.finish is not None:
        served.finish = now
        served.preemptions, served.switch_s = request.preemptions, request.switch_s


def quantities(served: Sequence[ServedRequest]) -> dict[str, float]:
    """Quantities of a served workload, simulated or measured, keyed as ``ServePlan.predicted``.

    ``tokens_per_s`` (output) and ``requests_per_s`` over ``total_s``, from the first arrival
    to the last token; mean, median, 95th and 99th percentile of the time to the first token
    (``ttft``), per token after it (``tpot``, left out where every output is one token) and to
    the last token (``e2e``). Requests that did not finish are left out.
    """
    ended = [one for one in served if not math.isnan(one.finish)]
    require(
        bool(ended),
        "served",
        len(served),
        expected="at least one request that finished",
        hint="give the workload at least one request",
    )
    total = max(one.finish for one in ended) - min(one.arrival for one in ended)
    total = max(total, 1e-12)
    quantities = {
        "tokens_per_s": sum(one.n_output for one in ended) / total,
        "requests_per_s": len(ended) / total,
        "total_s": total,
    }
    first = [one.ttft for one in ended]
    rest = [one.tpot for one in ended if one.n_output > 1]
    whole = [one.finish - one.arrival for one in ended]
    for name, values in (("ttft", first), ("tpot", rest), ("e2e", whole)):
        quantities |= summary(name, values)
    return quantities


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """``NAME_mean_s`` and the percentiles ``NAME_p50_s``, ``p95`` and ``p99``; none of nothing."""
    import numpy as np

    if not values:
        return {}
    summary = {f"{name}_mean_s": float(np.mean(values))}
    for share in (50, 95, 99):
        summary[f"{name}_p{share}_s"] = float(np.percentile(values, share))
    return summary
