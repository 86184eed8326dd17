"""Prediction beside measurement of a workload."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from own_home import own_home

torch = pytest.importorskip("torch")

import shoal  # noqa: E402
from shoal.core.errors import (  # noqa: E402
    ConfigError,
    ModelError,
    NoisyMachineError,
    PlanError,
)
from shoal.core.parts import Choice  # noqa: E402
from shoal.cost.score import Score  # noqa: E402
from shoal.cost.serving.simulator import SimulatedRunner, simulate  # noqa: E402
from shoal.cost.step_cost.fitted import FittedStepCost  # noqa: E402
from shoal.cost.workloads.chat import Chat  # noqa: E402
from shoal.ir import SchedulerLimits, ServeJob, ServeReport  # noqa: E402
from shoal.machine.described import load  # noqa: E402
from shoal.plan.batching.cache.paged import Paged  # noqa: E402
from shoal.plan.batching.schedulers.fcfs import Fcfs  # noqa: E402
from shoal.serve.bench.replay import bench_serve, replay, weights_of, with_workload  # noqa: E402
from shoal.serve.engine.loop import Engine  # noqa: E402

COST = FittedStepCost(step=0.01, token=0.001, prompt_pair=1e-6, decode_key=1e-5, chunk=0.002)


class VirtualTime:
    """A clock that only sleeping and predicted steps move."""

    def __init__(self, cost):
        self.now = 0.0
        self.runner = SimulatedRunner(cost)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def execute(self, step):
        result = self.runner.execute(step)
        self.now += result.seconds
        return result


@pytest.mark.parametrize("rate", [None, 2.0, 30.0])
def test_replay_in_virtual_time_is_the_simulation(rate):
    arrivals = Chat(rate=rate, scale=8.0).arrivals(
        count=60, vocab_size=100, max_position=256, seed=3
    )
    limits = SchedulerLimits(max_running=8, max_step_tokens=64, max_position=256)

    def scheduler():
        return Fcfs().build(Paged().build(700), limits)

    expected = simulate(scheduler(), COST, arrivals)
    time = VirtualTime(COST)
    seen = []
    served = replay(
        Engine(scheduler(), time, clock=time),
        arrivals,
        clock=time,
        sleep=time.sleep,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    assert [one.id for one in served] == [one.id for one in expected.served]
    for ours, theirs in zip(served, expected.served, strict=True):
        assert (ours.n_output, ours.n_cached) == (theirs.n_output, theirs.n_cached)
        assert ours.preemptions == theirs.preemptions
        assert ours.first == pytest.approx(theirs.first, abs=1e-9)
        assert ours.finish == pytest.approx(theirs.finish, abs=1e-9)
    assert seen[-1] == (60, 60)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    return tmp_path


JOB = ServeJob(
    model="shoal-0.3m",
    max_running=4,
    kv_tokens=1024,
    threads=1,
    workload=Choice(name="chat", options={"scale": 16.0}),
)


def test_a_report_with_prediction_and_measurement(home):
    model, where = weights_of(JOB)
    assert "random weights" in where
    notes = []
    report = bench_serve(
        JOB,
        requests=6,
        rate=500.0,
        machine=load("laptop"),
        model=model,
        profile_s=0.2,
        on_plan=notes.append,
    )
    assert notes == [report.plan]
    assert set(report.plan.predicted) <= set(report.measured)
    assert report.measured["requests_per_s"] > 0
    assert report.plan.job.workload.options == {"scale": 16.0, "requests": 6, "rate": 500.0}
    assert report.plan.job.kv_tokens == 1024
    for name, error in report.errors.items():
        if name in report.plan.predicted:
            value = report.plan.predicted[name].value
            assert report.measured[name] / value - 1 == pytest.approx(error)
    assert "tokens_per_s" in report.errors
    assert report.measured["memory_bytes"] > 1e7
    assert ServeReport.model_validate_json(report.model_dump_json()) == report


def test_what_is_planned_for_gpus_is_not_measured_on_a_cpu(home):
    model, _ = weights_of(JOB)
    options = {"requests": 2, "rate": 500.0, "model": model, "profile_s": 0}
    with pytest.raises(PlanError, match=r"made for GPUs of H100.*the CPU.*--anyway"):
        bench_serve(JOB, machine=load("H100"), **options)
    report = bench_serve(JOB, machine=load("H100"), anyway=True, **options)
    assert (report.device, report.errors) == ("cpu", {})
    assert report.plan.predicted


def test_a_run_on_a_busy_machine_says_how_to_measure_and_leaves_nothing(home, monkeypatch):
    monkeypatch.setattr("shoal.core.measure.noise_reasons", lambda: ["a compiler runs"])
    monkeypatch.setattr("shoal.serve.bench.replay._WAIT_S", 0.05)
    events = []
    with pytest.raises(NoisyMachineError, match=r"compiler.*--anyway \(anyway=True in Python\)"):
        shoal.run(JOB, machine="laptop", directory=home / "run", watch=events.append)
    assert "anyway=True" in events[0]["state"][2]
    assert not (home / "run").exists()


def test_what_cannot_be_benchmarked(home):
    with pytest.raises(ModelError, match=r"did you mean 'shoal-4m'"):
        weights_of(JOB.model_copy(update={"model": "shoal-4x"}))
    with pytest.raises(ConfigError, match="workload"):
        with_workload(JOB.model_copy(update={"workload": Choice(name="chatt")}), requests=3)
    assert with_workload(JOB) == JOB


def test_the_model_is_looked_up_before_the_machine_is_waited_for(home, monkeypatch):
    from shoal.app.cli import app

    monkeypatch.setattr("shoal.app.show.wait_until_quiet", lambda **_: pytest.fail("waited"))
    done = CliRunner().invoke(app, ["bench", "serve", "--model", "nothing", "-m", "laptop"])
    assert isinstance(done.exception, ModelError) and "'nothing'" in str(done.exception)


def test_the_command(home):
    from shoal.app.cli import app

    args = ["bench", "serve", "--model", "shoal-0.3m", "--requests", "4", "--rate", "800"]
    args += [
        "--workload",
        "chat",
        "--set",
        "workload.scale=16",
        "--set",
        "kv_tokens=1024",
        "--set",
        "threads=1",
    ]
    args += ["--set", "max_running=4", "-m", "laptop", "--anyway", "-q", "--profile", "0"]
    done = CliRunner().invoke(app, [*args, "-o", "json"])
    assert done.exit_code == 0, done.output
    report = ServeReport.model_validate(json.loads(done.stdout))
    (kept,) = Score().reports()
    assert kept == report
    done = CliRunner().invoke(app, [*args, "--no-score"])
    assert done.exit_code == 0, done.output
    assert "output tokens per second" in done.stdout
    assert len(Score().reports()) == 1
    done = CliRunner().invoke(app, [*args, "--trace", "a.jsonl"])
    assert done.exit_code != 0
    assert "a.jsonl" in str(done.exception) or "chat" in str(done.exception)
