"""The simulator against queueing theory, bookkeeping by hand, and a loop on a real clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, ServeError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.cost.serving.simulator import (
    ServedRequest,
    SimulatedRunner,
    Simulation,
    quantities,
    request_of,
    simulate,
)
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import Arrival, Output, Request, Scheduler, SchedulerLimits, Step, StepResult

LINE = FittedStepCost(step=1e-2, token=1e-3, prompt_pair=1e-6, decode_key=1e-5, chunk=1e-4)


class Constant:
    """Every step takes as long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._seconds


def scheduler(
    name: str = "fcfs", kv: str = "paged", tokens: int = 4096, running: int = 8, step: int = 64
) -> Any:
    bookkeeping = table("kv").build(kv).build(tokens)
    limits = SchedulerLimits(max_running=running, max_step_tokens=step, max_position=512)
    return table("scheduler").build(name).build(bookkeeping, limits)


def workload(count: int, rate: float | None = None, seed: int = 0) -> list[Arrival]:
    chosen = {"name": "chat", "rate": rate, "scale": 16}
    built = table("workload").build(chosen)
    arrivals: list[Arrival] = built.arrivals(
        count=count, vocab_size=100, max_position=512, seed=seed
    )
    return arrivals


class Recording:
    """A scheduler that remembers its steps."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.steps: list[list[tuple[str, int, int]]] = []

    def add(self, request: Request) -> None:
        self.inner.add(request)

    def abort(self, request_id: str) -> Output | None:
        return self.inner.abort(request_id)

    def plan(self, now: float) -> Step:
        step = self.inner.plan(now)
        if step:
            self.steps.append([(c.request.id, c.start, c.length) for c in step.chunks])
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        return self.inner.commit(step, result, now)

    @property
    def num_waiting(self) -> int:
        return self.inner.num_waiting

    @property
    def num_running(self) -> int:
        return self.inner.num_running


@pytest.mark.parametrize("load", [0.5, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_waiting_is_that_of_an_m_d_1_queue(load: float) -> None:
    """One at a time, equal service: the mean wait is load * service / (2 (1 - load))."""
    gaps = generator(1, purpose="m/d/1").exponential(1 / load, 100_000)
    arrivals = [Arrival(float(at), (1,), 1) for at in np.cumsum(gaps)]
    seen = simulate(scheduler(running=1), Constant(1.0), arrivals)
    waits = [one.first - one.arrival - 1.0 for one in seen.served]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.03)
    assert len(seen.steps) == 100_000


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
@pytest.mark.parametrize("name", ["fcfs", "static"])
def test_no_token_is_lost_or_made(name: str, kv: str) -> None:
    arrivals = workload(80, rate=20.0)
    built = scheduler(name, kv)
    seen = simulate(built, LINE, arrivals)
    assert (built.num_waiting, built.num_running) == (0, 0)
    assert [one.n_output for one in seen.served] == [one.output_tokens for one in arrivals]
    assert [one.n_prompt for one in seen.served] == [len(one.prompt) for one in arrivals]
    # Every token but the last of each is computed once, or was found in the cache.
    again = sum(one.preemptions for one in seen.served)
    assert again == 0
    wanted = sum(len(one.prompt) + one.output_tokens - 1 for one in arrivals)
    cached = sum(one.n_cached for one in seen.served)
    assert sum(step.tokens for step in seen.steps) == wanted - cached
    for one, arrival in zip(seen.served, arrivals, strict=True):
        assert arrival.at == one.arrival < one.first <= one.finish
    for before, after in zip(seen.steps, seen.steps[1:], strict=False):
        assert after.at >= before.at + before.seconds - 1e-9


def test_a_full_cache_computes_again_and_still_finishes() -> None:
    arrivals = workload(40)
    seen = simulate(scheduler(tokens=512, running=16), LINE, arrivals)
    again = sum(one.preemptions for one in seen.served)
    assert again == sum(step.preempted for step in seen.steps) > 0
    assert [one.n_output for one in seen.served] == [one.output_tokens for one in arrivals]


@pytest.mark.parametrize("name", ["fcfs", "static"])
def test_the_steps_are_those_of_a_loop_on_a_real_clock(name: str) -> None:
    """The engine's loop plans the same steps, whatever the time is."""
    arrivals = workload(12)
    virtual = Recording(scheduler(name))
    seen = simulate(virtual, LINE, arrivals)

    real = Recording(scheduler(name))
    for index, arrival in enumerate(arrivals):
        real.add(request_of(str(index), arrival))
    runner = SimulatedRunner(LINE)
    while step := real.plan(time.monotonic()):
        real.commit(step, runner.execute(step), time.monotonic())
    assert virtual.steps == real.steps
    assert len(seen.steps) == len(real.steps)


def test_time_moves_by_predicted_steps_and_jumps_to_arrivals() -> None:
    arrivals = [Arrival(0.0, (1, 2), 2), Arrival(10.0, (3,), 1)]
    seen = simulate(scheduler(), Constant(0.5), arrivals)
    first, second = seen.served
    assert (first.first, first.finish) == (0.5, 1.0)
    assert (second.first, second.finish) == (10.5, 10.5)
    assert [step.at for step in seen.steps] == [0.0, 0.5, 10.0]
    assert (first.ttft, first.tpot) == (0.5, 0.5)
    assert np.isnan(second.tpot)
    quantities = seen.quantities()
    assert quantities == {
        "tokens_per_s": pytest.approx(3 / 10.5),
        "requests_per_s": pytest.approx(2 / 10.5),
        "total_s": 10.5,
        **{f"ttft_{which}_s": 0.5 for which in ("mean", "p50", "p95", "p99")},
        **{f"tpot_{which}_s": 0.5 for which in ("mean", "p50", "p95", "p99")},
        "e2e_mean_s": 0.75,
        "e2e_p50_s": 0.75,
        "e2e_p95_s": pytest.approx(0.5 + 0.95 * 0.5),
        "e2e_p99_s": pytest.approx(0.5 + 0.99 * 0.5),
    }


def test_quantities_leave_out_what_did_not_finish() -> None:
    done = ServedRequest("a", 1.0, 5, first=2.0, finish=4.0, n_output=5)
    gone = ServedRequest("b", 0.0, 5, first=2.0, n_output=2)
    result = quantities([gone, done])
    assert result["requests_per_s"] == pytest.approx(1 / 3)
    assert result["tpot_p50_s"] == pytest.approx(0.5)
    single = quantities([ServedRequest("a", 1.0, 5, first=2.0, finish=2.0, n_output=1)])
    assert "tpot_p50_s" not in single


def test_shared_prefixes_shorten_the_time_to_the_first_token() -> None:
    arrivals = [Arrival(at, tuple(range(64)), 2) for at in (0.0, 10.0)]
    seen = simulate(scheduler(), LINE, arrivals)
    first, second = seen.served
    assert (first.n_cached, second.n_cached) == (0, 48)
    assert second.ttft < first.ttft


def test_refuses_arrivals_out_of_order_and_nothing_to_count() -> None:
    arrivals = [Arrival(1.0, (1,), 1), Arrival(0.5, (1,), 1)]
    with pytest.raises(ConfigError, match=r"arrivals\[1\].at = 0.5: expected at least 1.0"):
        simulate(scheduler(), LINE, arrivals)
    with pytest.raises(ConfigError, match="served = 0: expected at least one request"):
        Simulation().quantities()
    assert simulate(scheduler(), LINE, []).served == []


def test_refuses_a_request_that_can_never_run() -> None:
    with pytest.raises(ServeError, match="request 0: prompt tokens = 600"):
        simulate(scheduler(), LINE, [Arrival(0.0, (1,) * 600, 1)])
