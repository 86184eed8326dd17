"""Schedulers of one phase under random operations; goodput beside a dense scan; the search."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shoal.claims.lab.phased import DecodeLine, Phased, PromptLine
from shoal.core.errors import ConfigError, PlanError
from shoal.core.parts import table
from shoal.cost.serving.fleet import FleetSimulation, SimulatedFleet, SimulatedInstance, attainment
from shoal.cost.serving.simulator import ServedRequest
from shoal.cost.shapes import resolve
from shoal.ir import (
    Arrival,
    Disagg,
    Phase,
    Request,
    SamplingParams,
    SchedulerLimits,
    ServeJob,
    ServePlan,
    StepResult,
)
from shoal.machine.described import load
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.plan.emit import EMITTERS
from shoal.plan.serving.disagg import plan_goodput
from shoal.plan.serving.goodput import Goodput, Slo, poisson, replicas
from shoal.plan.serving.goodput_report import GoodputReport, drifted

LIMITS = SchedulerLimits(max_running=4, max_step_tokens=16, max_position=64)
COST = Phased(
    prefill=PromptLine(step=0.02, token=1e-4, square=0.0),
    decode=DecodeLine(step=0.02, key=0.0, request=1e-3),
)


def built(name: str, tokens: int) -> Any:
    kv = table("kv").build({"name": "paged", "block_size": 4}).build(tokens)
    return table("phase").build(name).build(kv, LIMITS)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_of_both_phases(seed: int) -> None:
    """No block is owned twice or lost; every request that is not aborted ends, whole."""
    draw = random.Random(seed)
    front, back = built("prefill", 96), built("decode", 96)
    wanted: dict[str, int] = {}
    done: dict[str, int] = {}
    fetching: list[str] = []
    flying: list[Any] = []
    number = 0
    for turn in range(3000):
        if turn < 2000 and draw.random() < 0.1:
            prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
            params = SamplingParams(max_tokens=draw.randrange(1, 20))
            request = Request(f"r{number}", prompt, len(prompt), params)
            front.add(request)
            wanted[request.id] = params.max_tokens
            number += 1
        # Two steps of prompts may be under way, and are committed in order.
        if len(flying) < 2 and (step := front.plan(0.0)):
            assert not {c.request.id for s in flying for c in s.chunks} & {
                c.request.id for c in step.chunks
            }
            flying.append(step)
        if flying and draw.random() < 0.7:
            step = flying.pop(0)
            given = {c.request.id: [1] for c in step.chunks if c.yields}
            for output in front.commit(step, StepResult(given), 0.0):
                done[output.request_id] = 1
                if output.finish is None:
                    held = front.held[output.request_id]
                    assert held.blocks
                    moved = Request(held.id, list(held.tokens), held.n_prompt, held.params)
                    back.add(moved)
        fetching += [one.id for one in back.accept()]
        if fetching and draw.random() < 0.7:
            name = fetching.pop(draw.randrange(len(fetching)))
            back.arrived(name)
            front.release(name)
        step = back.plan(0.0)
        given = {c.request.id: [1] for c in step.chunks if c.yields}
        for output in back.commit(step, StepResult(given), 0.0):
            done[output.request_id] += len(output.tokens)
        if draw.random() < 0.03 and wanted:
            name = draw.choice(list(wanted))
            back.abort(name)
            front.abort(name)
            wanted.pop(name)
        front.kv.check_integrity({**front.running, **front.held})
        back.kv.check_integrity({**back.running, **back.fetching, **back.ready})
        waiting = sum(len(r.blocks) for book in (back.fetching, back.ready) for r in book.values())
        # One alone may be larger than the share of those that do not run yet.
        number_waiting = len(back.fetching) + len(back.ready)
        assert waiting <= 0.2 * back.kv.num_blocks or number_waiting == 1
    assert {name: done.get(name) for name in wanted} == wanted
    for one in (front, back):
        assert one.num_running == one.num_waiting == 0
        assert one.kv.num_free == one.kv.num_blocks


def test_prompts_share_a_step_up_to_the_batch_and_long_ones_go_alone() -> None:
    limits = SchedulerLimits(max_running=8, max_step_tokens=100, max_position=512)
    for kind, name in (("phase", "prefill"), ("scheduler", "prefill_first")):
        part = table(kind).build({"name": name, "batch_tokens": 50})
        scheduler: Any = part.build(table("kv").build("paged").build(4096), limits)
        for index, size in enumerate((20, 30, 10, 70, 5, 250)):
            params = SamplingParams(max_tokens=1)
            scheduler.add(
                Request(f"{name}{index}", [index * 300 + n for n in range(size)], size, params)
            )
        steps = []
        while step := scheduler.plan(0.0):
            steps.append([chunk.length for chunk in step.chunks])
            given = {c.request.id: [1] for c in step.chunks if c.yields}
            scheduler.commit(step, StepResult(given), 0.0)
        assert steps == [[20, 30], [10], [70], [5], [100], [100], [50]]


def rates(devices: int = 1) -> Goodput:
    def serve(arrivals: list[Arrival]) -> SimulatedFleet:
        kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(4096)
        limits = SchedulerLimits(max_running=32, max_step_tokens=256, max_position=512)
        one = SimulatedInstance(table("scheduler").build("prefill_first").build(kv, limits), COST)
        return SimulatedFleet([one], [], LeastLoadedDispatcher(1), arrivals)

    requests = [Arrival(0.0, (1,) * n, 2 + n % 5) for n in range(10, 40)]
    return Goodput(serve, poisson(requests, 500, 0), devices)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_found_rate_is_that_of_a_dense_scan() -> None:
    slo, result = Slo(ttft=0.15, tpot=0.06), rates()
    best = result.find(slo, tolerance=1.0)
    dense = [1.0 * n for n in range(1, 60)]
    good = [rate for rate in dense if result.attained(rate, slo) >= slo.share]
    assert abs(best - max(good)) <= 1.0 + 1e-9
    assert 1 < best < 59
    # Where nothing is good enough there is no goodput; elsewhere rates are below one a second.
    assert result.find(Slo(ttft=0.01, tpot=0.06)) == 0
    assert rates(devices=2).find(slo, tolerance=0.5) == pytest.approx(best / 2, abs=1.0)


def test_a_rate_is_simulated_until_it_is_decided_and_no_further() -> None:
    slo, many = Slo(ttft=0.15, tpot=0.06), rates()
    decided = {rate: many.passes(rate, slo) for rate in (5.0, 10.0, 400.0)}
    work = {rate: many.load(rate, slo) for rate in decided}
    assert decided == {5.0: True, 10.0: True, 400.0: False}
    fleets = {rate: many._at(rate) for rate in decided}
    # Far too many requests are known to be so when a few more than a tenth of them came.
    ended = [one for one in fleets[400.0].seen.served if not math.isnan(one.finish)]
    assert len(ended) < 150
    assert work[400.0] > 1 >= work[10.0]
    for rate, fleet in fleets.items():
        # The same simulation goes on when more is asked; what was decided stays so.
        share = many.attained(rate, slo)
        assert many._at(rate) is fleet
        assert share == attainment(fleet.finish().served, ttft=slo.ttft, tpot=slo.tpot)
        assert (share >= slo.share) == decided[rate]


class Line:
    """A setting whose requests take longer the more of them come; ``at`` meets targets of 1 s.

    Args:
        at: a second, the most that is good enough.
        power: of the rate, by which they take longer.
    """

    def __init__(self, at: float, power: float) -> None:
        self.at, self.power, self.asked = at, power, 0

    def __call__(self, arrivals: list[Arrival]) -> SimpleNamespace:
        self.asked += 1
        rate = (len(arrivals) - 1) / (arrivals[-1].at - arrivals[0].at)
        late = (rate / self.at) ** self.power * (1 - 1e-9)
        ends = [ServedRequest("x", one.at, 1, one.at + late, one.at + late, 1) for one in arrivals]
        return SimpleNamespace(now=math.inf, seen=FleetSimulation(ends))


@pytest.mark.parametrize("power", [0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("at", [0.3, 7.0, 130.3, 1e5])
def test_few_simulations_find_what_doubling_and_halving_find(at: float, power: float) -> None:
    slo, line = Slo(ttft=1.0, tpot=1.0), Line(at, power)
    even = [Arrival(float(n), (1,), 1) for n in range(20)]
    position = Goodput(line, even).find(slo, relative=0.02, near=2 * at)  # type: ignore[arg-type]
    low = high = 1.0
    while high <= at:
        low, high = high, 2 * high
    while low > at:
        high, low = low, low / 2
    while high - low > max(0.05 * min(1.0, high), 0.02 * high):
        middle = (low + high) / 2
        low, high = (middle, high) if middle <= at else (low, middle)
    assert position == low
    assert line.asked <= 12
    # Nothing is good enough; everything is, as far as anybody asks.
    assert Goodput(Line(1e-9, 1.0), even).find(slo) == 0  # type: ignore[arg-type]
    assert Goodput(Line(1e9, 1.0), even).find(slo, most=64.0) == 64  # type: ignore[arg-type]


def test_copies_for_a_rate() -> None:
    assert [replicas(rate, 2.5) for rate in (2.0, 2.5, 2.6, 10.0)] == [1, 1, 2, 4]
    with pytest.raises(ConfigError, match="goodput"):
        replicas(1.0, 0.0)


def job(**changes: Any) -> ServeJob:
    fields: dict[str, Any] = {
        "model": "Qwen3-8B",
        "workload": {"name": "code", "scale": 4},
        "max_running": 32,
        "max_position": 1024,
        "max_step_tokens": 1024,
    }
    return ServeJob.model_validate({**fields, **changes})


@pytest.fixture(scope="module")
def report() -> GoodputReport:
    coarse = Slo(ttft=0.15, tpot=0.03)
    return plan_goodput(
        job(), load("2xH100"), coarse, costs=lambda tp, pp: COST, tolerance=2.0, wanted=1000.0
    )


@pytest.mark.slow
def test_the_search_compares_both_kinds(report: GoodputReport, tmp_path: Path) -> None:
    apart, both = report.best_of(apart=True), report.best_of(apart=False)
    assert apart is not None
    assert both is not None
    assert report.best.goodput == max(one.goodput for one in report.tried)
    assert apart.setting.devices == 2
    assert {str(one.setting.scheduler) for one in report.tried if one.setting.both} == {
        "fcfs",
        "prefill_first",
    }
    curve = dict(both.curve)
    assert min(curve.values()) < 0.9 <= max(curve.values())
    assert report.notes == (
        f"1000 requests/s need {replicas(1000.0, report.best.goodput)} times these 2 devices",
    )
    assert "requests per second and device" in report.picture()
    report.save(tmp_path / "r.yaml")
    assert GoodputReport.load(tmp_path / "r.yaml") == report


def test_no_prompt_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated one would be in a cache, of which the workload has said nothing."""
    seen: list[list[Arrival]] = []

    def recording(*args: Any) -> list[Arrival]:
        seen.append(poisson(*args))
        return seen[-1]

    # Before prompts are blanked for a cache that counts blocks alone.
    monkeypatch.setattr("shoal.plan.serving.disagg.poisson", recording)
    monkeypatch.setattr(Goodput, "find", lambda *args, **kwargs: 0.0)
    slo = Slo(ttft=0.15, tpot=0.03)
    with pytest.raises(PlanError, match="no setting"):
        plan_goodput(job(), load("3xH100"), slo, costs=lambda tp, pp: COST, tolerance=2.0)
    assert {len(arrivals) for arrivals in seen} == {500, 1000}
    for arrivals in seen:
        assert len({one.prompt for one in arrivals}) > 0.99 * len(arrivals)


@pytest.mark.slow
def test_a_plan_is_made_anew_when_requests_differ(report: GoodputReport) -> None:
    lengths = round(report.workload["prompt_p50"]), round(report.workload["output_p50"])
    same = [Arrival(n / 1000, (1,) * lengths[0], lengths[1]) for n in range(50)]
    assert drifted(report, same) == ""
    longer = [Arrival(n / 1000, (1,) * (2 * lengths[0]), lengths[1]) for n in range(50)]
    assert "median prompt" in drifted(report, longer)
    slower = [Arrival(n / 100, (1,) * lengths[0], lengths[1]) for n in range(50)]
    assert "rate" in drifted(report, slower)


def test_what_nothing_serves() -> None:
    slow = Phased(
        prefill=PromptLine(step=0.041, token=0.0, square=0.0),
        decode=DecodeLine(step=0.02, key=0.0, request=0.0),
    )

    def ask(machine: str = "2xH100", ttft: float = 0.2, tpot: float = 0.03, **changes: Any) -> None:
        options = {"devices": None, **changes.pop("options", {})}
        plan_goodput(
            job(**changes),
            load(machine),
            Slo(ttft=ttft, tpot=tpot),
            costs=lambda *_: slow,
            **options,
        )

    with pytest.raises(
        PlanError, match="TTFT target 20 ms is below the prefill time 41 ms of the median prompt"
    ):
        ask(ttft=0.02)
    with pytest.raises(
        PlanError, match="TPOT target 10 ms is below the time of a step alone 20 ms"
    ):
        ask(tpot=0.01)
    with pytest.raises(PlanError, match="--devices = 1: expected at least 2"):
        ask("H100")
    with pytest.raises(PlanError, match="fits no phase: an instance of at most 1 of 2 devices"):
        ask(model="Llama-3-70B")
    with pytest.raises(PlanError, match="at least 500"):
        ask(options={"requests": 10})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_phases_are_written_for_other_engines(engine: str) -> None:
    phases = Disagg(prefill=Phase(count=2, tp=2), decode=Phase(count=1, tp=4))
    request = job(disagg=phases, precision="bf16", kv_tokens=4096)
    plan = ServePlan(job=request, machine=load("8xH100"), shape=resolve("Qwen3-8B"))
    files = EMITTERS.build(engine).emit(plan)
    assert set(files) == {"prefill.yaml", "prefill.sh", "decode.yaml", "decode.sh", "router.sh"}
    key = {"vllm": "tensor-parallel-size", "sglang": "tp-size"}[engine]
    assert yaml.safe_load(files["prefill.yaml"])[key] == 2
    assert yaml.safe_load(files["decode.yaml"])[key] == 4
    # The router knows all three instances by the ports that their scripts give them.
    port = {"vllm": 8000, "sglang": 30000}[engine]
    for number in (port + 100, port + 101, port + 200):
        assert str(number) in files["router.sh"]
    with pytest.raises(PlanError, match="one server does both phases"):
        EMITTERS.build("llamacpp").emit(plan)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (job(), load("2xH100"), Slo(ttft=0.15, tpot=0.03))
    alone = plan_goodput(*given, tolerance=2.0)
    monkeypatch.setattr("shoal.plan.serving.disagg._LONG", 0)
    assert plan_goodput(*given, tolerance=2.0, processes=2) == alone
