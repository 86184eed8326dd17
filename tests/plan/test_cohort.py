"""Decodes that are counted: a simulation sees the same as where each is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.cost.serving.fleet import KVTransferLink, SimulatedInstance, simulate_fleet
from shoal.cost.serving.simulator import Simulation, simulate, simulate_ahead, stretched
from shoal.ir import (
    Arrival,
    HostLink,
    Prompt,
    Request,
    SamplingParams,
    SchedulerLimits,
    ServeJob,
    StepCost,
    StepResult,
)
from shoal.plan.batching.common import DigestChain
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.plan.batching.schedulers.ahead import AheadScheduler
from shoal.plan.serving.simulation import blank, build_cache, counts_blocks


class Named:
    """A cost of sums that is asked for them chunk by chunk."""

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        tokens = sum(length for _, length in chunks)
        return 1e-2 + 1e-3 * tokens + 1e-5 * sum(start for start, _ in chunks)


class Counted(Named):
    """The same, which also takes sums of decodes."""

    def __init__(self) -> None:
        self.counted = 0

    def counted_seconds(
        self, chunks: Sequence[tuple[int, int]], decodes: int, contexts: int
    ) -> float:
        self.counted += 1
        tokens = sum(length for _, length in chunks) + decodes
        return 1e-2 + 1e-3 * tokens + 1e-5 * (sum(start for start, _ in chunks) + contexts)


def workload(count: int) -> list[Arrival]:
    part = table("workload").build({"name": "chat", "rate": 20.0, "scale": 16})
    arrivals: list[Arrival] = part.arrivals(count=count, vocab_size=100, max_position=256, seed=0)
    return arrivals


def scheduler(name: str, tokens: int, step: int = 64, preempt: str = "recompute") -> Any:
    kv = table("kv").build("paged").build(tokens)
    limits = SchedulerLimits(max_running=16, max_step_tokens=step, max_position=512)
    host = 0 if preempt == "recompute" else 4096
    preemption = table("preempt").build(preempt).build(kv, limits, host_tokens=host)
    return table("scheduler").build(name).build(kv, limits, preemption)


@pytest.mark.parametrize(
    ("name", "tokens", "step", "preempt"),
    [
        ("fcfs", 4096, 64, "recompute"),
        ("fcfs", 160, 64, "recompute"),
        ("fcfs", 160, 64, "swap"),
        ("fcfs", 4096, 8, "recompute"),  # more requests than a step has tokens
        ("prefill_first", 4096, 64, "recompute"),
        ("prefill_first", 160, 64, "recompute"),
    ],
)
def test_a_simulation_is_the_same(name: str, tokens: int, step: int, preempt: str) -> None:
    arrivals, link = workload(80), HostLink(copy_s=1e-4, bytes_per_s=1e6, block_bytes=1e3)
    cost = Counted()
    one, other = (scheduler(name, tokens, step, preempt) for _ in range(2))
    seen = simulate(one, cost, arrivals, link=link)
    want = simulate(other, Named(), arrivals, link=link)
    assert cost.counted > 50
    assert (tokens == 160) == any(record.preempted for record in want.steps)
    assert seen.steps == want.steps
    assert seen.served == want.served
    assert one.kv.stats() == other.kv.stats()
    one.kv.check_integrity({})


def test_phases_on_instances_are_the_same() -> None:
    arrivals, wire = workload(80), KVTransferLink(bandwidth=1e6, token_bytes=512.0, overlap=True)

    def served(cost: StepCost) -> list[Any]:
        limits = SchedulerLimits(max_running=16, max_step_tokens=64, max_position=512)
        front, back = (
            SimulatedInstance(
                table("phase").build(name).build(table("kv").build("paged").build(192), limits),
                cost,
            )
            for name in ("prefill", "decode")
        )
        dispatcher = LeastLoadedDispatcher(1, 1)
        seen = simulate_fleet([front], [back], dispatcher, arrivals, wire=wire)
        return [*seen.served, *seen.moves, *seen.busy_s]

    cost = Counted()
    assert served(cost) == served(Named())
    assert cost.counted > 50


def test_one_that_is_aborted_is_up_to_date() -> None:
    one = scheduler("fcfs", 4096)
    one.count_decodes()
    requests = [Request(str(n), [7] * 5, 5, SamplingParams(max_tokens=40)) for n in range(2)]
    for request in requests:
        one.add(request)
    one.commit(one.plan(0.0), StepResult({"0": (0,), "1": (0,)}), 0.0)
    for steps in range(20):
        step = one.plan(0.0)
        assert (step.decodes, step.contexts, step.chunks) == (2, 2 * (5 + steps), ())
        assert step.num_tokens == step.num_requests == 2
        assert one.commit(step, StepResult({}), 0.0) == []
    one.cohort.leave("1")
    assert requests[1].n_computed == 25
    assert requests[1].tokens == [7] * 5 + [0] * 21
    one.kv.check_integrity({"1": requests[1]} | {"0": requests[0]})
    one.abort("0")
    assert one.plan(0.0).contexts == 25


def test_a_scheduler_that_serves_sessions_names_each_decode() -> None:
    cost = Counted()
    seen = simulate(scheduler("fair", 4096), cost, workload(20))
    assert cost.counted == 0
    assert all(one.n_output for one in seen.served)


def test_digests_of_a_prompt_are_kept_and_are_those_of_the_tokens() -> None:
    prompt = Prompt(range(40))
    for answer in ([0] * 60, [0] * 90, [0] * 30 + [1] * 60):
        tokens = [*prompt, *answer]
        request = Request("a", tokens, 40, SamplingParams(max_tokens=100), prompt=prompt)
        plain = Request("b", tokens, 40, SamplingParams(max_tokens=100))
        salted = Request("c", tokens, 40, SamplingParams(max_tokens=100), salt="s", prompt=prompt)
        blocks = len(tokens) // 16
        want = DigestChain(plain, 16).upto(plain, blocks)
        for most in (1, 2, blocks):
            seen = DigestChain(request, 16).upto(request, most)
            assert list(seen[:most]) == list(want[:most])
        assert not set(DigestChain(salted, 16).upto(salted, blocks)) & set(want)


@pytest.mark.parametrize("name", ["fcfs", "prefill_first", "fair", "static"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_slower_simulation_is_the_same_steps_stretched(name: str, stages: int) -> None:
    """Where all requests come at once: to the last digit, preemptions and all."""
    assert "reads_no_clock" in traits("scheduler", name) & traits("preempt", "recompute")
    part = table("workload").build({"name": "chat", "scale": 16})
    arrivals = part.arrivals(count=60, vocab_size=100, max_position=256, seed=0)

    def served(cost: StepCost) -> Simulation:
        one = scheduler(name, 400)
        if stages == 1:
            return simulate(one, cost, arrivals)
        ahead = AheadScheduler(one, stages)
        return simulate_ahead(one, ahead, cost, arrivals, stages=stages)

    seen = served(Named())
    assert name == "static" or any(one.preemptions for one in seen.served)
    for factor in (1 / 1.37, 1.37):

        class Paced(Named):
            def seconds(self, chunks: Sequence[tuple[int, int]], factor: float = factor) -> float:
                return factor * super().seconds(chunks)

        assert stretched(seen, factor, stages=stages) == served(Paced()).served


@pytest.mark.parametrize("name", ["fcfs", "prefill_first", "fair", "static"])
@pytest.mark.parametrize("tokens", [300, 420, 4096])
@pytest.mark.parametrize("reuse", [False, True])
def test_counted_blocks_are_as_good_as_named_ones(name: str, tokens: int, reuse: bool) -> None:
    """Where no two requests start alike: the same steps, and the same found and evicted."""
    choice = {"name": "paged", "prefix_reuse": reuse}
    job = ServeJob(model="shoal-4m", kv=choice)
    arrivals = [
        replace(one, prompt=(number, *one.prompt)) for number, one in enumerate(workload(80))
    ]
    assert counts_blocks(job, arrivals)
    assert not counts_blocks(job, [*arrivals, arrivals[0]])
    seen, books = [], []
    for counted in (False, True):
        kv = build_cache(job, tokens, counted=counted)
        limits = SchedulerLimits(max_running=16, max_step_tokens=64, max_position=280)
        one = table("scheduler").build(name).build(kv, limits)
        seen.append(simulate(one, Counted(), blank(arrivals) if counted else arrivals))
        books.append(kv.stats())
    assert seen[0] == seen[1]
    assert all(books[0][key] == value for key, value in books[1].items())
    if tokens == 300 and name != "static":
        assert any(one.preemptions for one in seen[0].served)
        assert not reuse or (books[0]["prefix_hit_tokens"] and books[0]["evictions"])
