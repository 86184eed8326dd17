"""Corrections by the user's own runs: what one run does, what is stored, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import StoreError
from shoal.cost.calibration import (
    SHARES,
    Shares,
    calibrate,
    calibrated,
    corrected,
    corrected_latencies,
    forget,
    pooled,
)
from shoal.cost.published.scoreboard import score_training
from shoal.cost.published.shared import (
    by_machine,
    loops_by_machine,
    one_run_study,
    shares_of,
)
from shoal.cost.score import Score
from shoal.cost.shapes import resolve
from shoal.cost.training.step import estimate
from shoal.ir import (
    Interval,
    Machine,
    ServeJob,
    ServePlan,
    ServeReport,
    TrainJob,
    TrainPlan,
    TrainReport,
    Work,
    predictions,
)
from shoal.machine.described import load

MACHINE = load("8xH100")
FACTOR = 1.4  # of the synthetic machine: everything takes so many times as long


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    return Score()


def planned(machine: Machine = MACHINE, model: str = "Llama-3-8B", **job: Any) -> TrainPlan:
    given = {"seq_len": 2048, "global_batch": 16, "microbatch": 1, "shard": "zero3", **job}
    one = TrainJob.model_validate({"model": model, "parallel": {"dp": 8}, **given})
    shape = resolve(model)
    cost = estimate(Work(shape=shape, job=one), machine)
    cost = corrected(cost, machine, one.engine, "step_s", model)
    return TrainPlan(job=one, machine=machine, shape=shape, estimate=cost)


def ran(plan: TrainPlan, factor: float = FACTOR) -> TrainReport:
    """A run on the synthetic machine, whatever the plan was corrected by."""
    bare = planned(plan.machine.model_copy(update={"calibration": None}), plan.job.model,
                   global_batch=plan.job.global_batch, seq_len=plan.job.seq_len,
                   engine=plan.job.engine)  # fmt: skip
    assert bare.estimate is not None
    return TrainReport(plan=plan, measured={"step_s": factor * bare.estimate.step_s.value})


def off(plan: TrainPlan, factor: float = FACTOR) -> float:
    assert plan.estimate is not None
    return abs(ran(plan, factor).measured["step_s"] / plan.estimate.step_s.value - 1)


def test_one_run_improves_all_others_and_more_runs_more(score: Score) -> None:
    others: list[dict[str, Any]] = [
        {"global_batch": 64},
        {"seq_len": 8192},
        {"model": "Llama-3.2-1B"},
        {"model": "Qwen3-14B"},
    ]
    before = [off(planned(**other)) for other in others]
    assert before == [pytest.approx(FACTOR - 1)] * 4
    score.append(ran(planned()))
    calibrate()
    machine, wrong = calibrated(MACHINE)
    assert not wrong
    one = [off(planned(machine, **other)) for other in others]
    assert all(now < then for now, then in zip(one, before, strict=True))
    assert max(one[:2]) < 0.5 * min(before[:2])  # of the same model
    # The second and third are planned with the correction: it is taken out again.
    for batch in (32, 128):
        score.append(ran(planned(machine, global_batch=batch)))
        calibrate()
        machine, _ = calibrated(MACHINE)
    more = [off(planned(machine, **other)) for other in others]
    assert all(now < then for now, then in zip(more, one, strict=True))
    own = machine.correction("shoal", "step_s", "Llama-3-8B")
    assert own is not None and own.runs == 3 and 1.2 < own.factor < FACTOR


def test_times_change_and_memory_does_not(score: Score) -> None:
    score.append(ran(planned()))
    calibrate()
    machine, _ = calibrated(MACHINE)
    before, after = planned(steps=100).estimate, planned(machine, steps=100).estimate
    assert before is not None and before.total_s is not None
    assert after is not None and after.total_s is not None
    assert after.memory_bytes == before.memory_bytes and after.wire_bytes == before.wire_bytes
    ratio = after.step_s.value / before.step_s.value
    # Saves and failures take as long as before.
    fixed = before.whole_s["saves"] + before.whole_s["failures"]
    total = ratio * (before.total_s.value - fixed) + fixed
    assert after.total_s.value == pytest.approx(total)
    assert sum(after.whole_s.values()) == pytest.approx(total)
    for name in ("energy_j", "usd"):
        share = getattr(after, name).value / getattr(before, name).value
        assert share == pytest.approx(total / before.total_s.value)
    assert sum(after.terms_s.values()) == pytest.approx(after.step_s.value)
    # One run of the same model leaves less unknown.
    assert after.step_s.high / after.step_s.low < before.step_s.high / before.step_s.low
    assert after.total_s.low < after.total_s.value < after.total_s.high


def test_it_holds_for_the_machine_and_the_engine_alone(score: Score) -> None:
    score.append(ran(planned(engine="torchtitan")))
    calibrate()
    machine, _ = calibrated(MACHINE)
    assert machine.correction("torchtitan", "step_s", "Llama-3-8B") is not None
    assert machine.correction("shoal", "step_s", "Llama-3-8B") is None
    assert calibrated(load("16xH100"))[0].calibration is None


def test_the_posterior_is_that_of_the_stated_model() -> None:
    """Against the normal model written out as one joint covariance."""
    import numpy as np

    shares, logs = Shares(0.2, 0.6), {"a": [0.3, 0.31], "b": [0.1]}
    rows = [(model, log) for model, own in logs.items() for log in own]

    def covariance(one: str, two: str) -> float:
        return shares.model if one == two else shares.machine

    K = np.array([[covariance(m, n) for n, _ in rows] for m, _ in rows])
    # Of the spread of a model's own runs: four published ones, and the two that are here.
    rest = (4 * (1 - shares.model) + 2 * 0.005**2) / 5
    K += rest * np.eye(len(rows))
    for model in ("a", "b", "c"):
        k = np.array([covariance(model, m) for m, _ in rows])
        wanted = k @ np.linalg.solve(K, np.array([log for _, log in rows]))
        left = shares.model + rest - k @ np.linalg.solve(K, k)
        log, width = pooled(logs, model, shares, 1.0)
        assert log == pytest.approx(wanted) and width == pytest.approx(math.sqrt(left))
    assert pooled({"a": [0.5, -0.5]}, "a", shares)[1] > 1  # runs that contradict each other


def test_repeats_of_a_job_are_one_and_errors_leave_a_run_out(score: Score) -> None:
    for factor in (1.38, 1.40, 1.42):
        score.append(ran(planned(), factor))
    (own, rest) = calibrate().results
    assert own.correction.runs == 3 and own.after is None
    assert own.correction.factor == pytest.approx(1.4 ** SHARES["step_s"].model)
    assert rest.correction.model == "" and rest.correction.factor < own.correction.factor
    score.append(ran(planned(global_batch=64)))
    own = calibrate().results[0]
    assert own.before == pytest.approx(0.4) and own.after == pytest.approx(
        1.4 ** (1 - SHARES["step_s"].model) - 1
    )


def served(version: str = "vllm", **measured: float) -> ServeReport:
    job = ServeJob(model="Qwen3-8B", engine="vllm")
    predicted = {
        f"{name}_{which}_s": Interval.around(value, 0.3)
        for name, value in (("ttft", 0.2), ("tpot", 0.02), ("e2e", 2.2))
        for which in ("p50", "p99")
    }
    predicted["tokens_per_s"] = Interval.around(1000.0, 0.3)
    plan = ServePlan(job=job, machine=MACHINE, shape=resolve("Qwen3-8B"), predicted=predicted)
    return ServeReport(plan=plan, measured=measured, versions={"log": version} if version else {})


def test_latencies_of_serving_are_corrected_each_by_its_own(score: Score) -> None:
    score.append(served(tpot_p50_s=0.03, ttft_p50_s=0.1))
    calibrate()
    machine, _ = calibrated(MACHINE)
    before = predictions(served().plan)
    after = corrected_latencies(before, machine, "vllm", "Qwen3-8B")
    slower = 1.5 ** SHARES["tpot"].model
    sooner = 0.5 ** SHARES["ttft"].model
    assert after["tpot_p99_s"].value == pytest.approx(slower * 0.02)
    assert after["ttft_p50_s"].value == pytest.approx(sooner * 0.2)
    assert after["e2e_p50_s"].value == pytest.approx(slower * 2.0 + sooner * 0.2)
    assert after["tokens_per_s"] == before["tokens_per_s"]
    # Published runs of different models on a device have nothing in common.
    assert corrected_latencies(before, machine, "vllm", "Qwen3-32B") == before


def test_what_is_no_price_is_no_row(score: Score) -> None:
    score.append(served("", tpot_p50_s=0.03))  # Shoal's bench predicts from a profile
    score.append(ran(planned()).model_copy(update={"device": "cpu"}))
    with pytest.raises(StoreError, match="--import LOG --plan PLAN"):
        calibrate()


@pytest.mark.parametrize("measured", [0.0, -1.0, 12.0])
def test_wrong_numbers_are_left_out_and_named(score: Score, measured: float) -> None:
    score.append(ran(planned(name="odd"), measured))
    with pytest.raises(StoreError, match="left out: odd: step_s measured"):
        calibrate()
    score.append(ran(planned(global_batch=64)))
    made = calibrate()
    assert made.results[0].correction.runs == 1 and "odd" in made.left_out[0]


def test_a_machine_without_runs(score: Score) -> None:
    score.append(ran(planned()))
    with pytest.raises(StoreError, match="score of 4xA100 has no run"):
        calibrate(load("4xA100"))


def test_machines_are_kept_and_forgotten_one_by_one(score: Score, tmp_path: Path) -> None:
    score.append(ran(planned()))
    calibrate()
    here = load("1xH100")
    score.append(ran(planned(load("16xH100"))))
    calibrate(load("16xH100"))
    assert calibrated(MACHINE)[0].calibration and calibrated(load("16xH100"))[0].calibration
    assert not forget(here)
    assert forget(MACHINE)
    assert calibrated(MACHINE)[0] == MACHINE and calibrated(load("16xH100"))[0].calibration
    assert forget() and not forget()
    assert not (tmp_path / "calibration.json").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "version None"),
        ("{", "calibration.json"),
        ('{"version": 7}', "version 7, and this release reads 1"),
        ('{"version": 1, "made": "x", "results": [{"machine": 3}]}', "results"),
        ('{"version": 1, "made": "x", "results": "no"}', "results"),
        ("\0\1\2", "calibration.json"),
    ],
)
def test_another_or_a_damaged_file_is_named_and_left_out(
    score: Score, tmp_path: Path, text: str, named: str
) -> None:
    score.append(ran(planned()))
    path = tmp_path / "calibration.json"
    path.write_text(text)
    machine, wrong = calibrated(MACHINE)
    assert machine == MACHINE and named in wrong and "--forget" in wrong
    with pytest.raises(StoreError, match=r"calibration\.json"):
        calibrate()
    assert path.read_text() == text
    assert forget() and not calibrated(MACHINE)[1]


def test_hostile_factors_are_refused(score: Score, tmp_path: Path) -> None:
    score.append(ran(planned()))
    calibrate()
    path = tmp_path / "calibration.json"
    good = path.read_text()
    for key, value in (("factor", 0.0), ("factor", -2), ("factor", 1e9), ("width", 0)):
        raw = json.loads(good)
        raw["results"][0]["correction"][key] = value
        path.write_text(json.dumps(raw))
        machine, wrong = calibrated(MACHINE)
        assert machine == MACHINE and key in wrong


@pytest.mark.slow
def test_shares_are_those_of_published_runs() -> None:
    board = score_training()
    found = {"step_s": shares_of(by_machine(board))}
    found["tpot"], found["ttft"] = (shares_of(loops_by_machine(q)) for q in ("tpot", "ttft"))
    for quantity, shares in found.items():
        assert shares == pytest.approx(SHARES[quantity], abs=0.011)


@pytest.mark.slow
def test_one_published_row_improves_the_others_of_its_machine() -> None:
    study = one_run_study(score_training())
    # Where machines are priced well already, one row is worth little: what it improves is the mean.
    assert study.machines >= 50 and study.better > 0.4 * study.machines
    assert study.others[1] < study.one[1] < study.priced[1]
    assert study.others[0] < study.priced[0]
    assert study.same[0] < study.same[1]
