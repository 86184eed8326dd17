"""``shoal score --calibrate`` as a user meets it: one log, and plans from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import ConfigError, StoreError
from shoal.ir import ServePlan, TrainPlan

TRAIN = ("plan", "train", "Llama-3.2-1B", "-m", "8xH100", "--tokens", "1B", "--seq-len", "2048")
SERVE = ("plan", "serve", "Llama-3.2-1B", "-m", "H100", "--engine", "vllm", "--requests", "8")
SHORT = ("--no-compare", "--set", "max_position=2048")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def step(*words: str) -> float:
    plans = json.loads(CliRunner().invoke(app, [*TRAIN, "--top", "1", "-o", "json", *words]).stdout)
    value: float = plans[0]["estimate"]["step_s"]["value"]
    return value


def imported(factor: float = 1.3) -> None:
    """The log of a run of torchtitan that took so many times as long as was planned."""
    run(*TRAIN, "--emit", "torchtitan", "--set", "shard=zero3", "--set", "parallel={dp: 8}")
    plan = TrainPlan.load(Path("launch-torchtitan/plan.yaml"))
    assert plan.estimate is not None
    rate = plan.estimate.tokens_per_s / 8 / factor
    line = "step: {}  loss: 10.0  memory: 40.00GiB(50.00%)  tps: {:,.0f}  tflops: 300.00  mfu: 30%"
    Path("train.log").write_text("\n".join(line.format(i, rate) for i in range(1, 6)) + "\n")
    run("score", "--import", "train.log", "--plan", "launch-torchtitan/plan.yaml")


def test_one_imported_log_corrects_the_plans_that_follow(home: Path) -> None:
    before = step("--engine", "torchtitan")
    imported()
    shown = run("score", "--calibrate")
    assert "8xH100 torchtitan step_s Llama-3.2-1B 1 1.20" in shown and "all others" in shown
    assert "30.0 %" in shown and str(home / "calibration.json").replace(" ", "") in shown
    assert step("--engine", "torchtitan") == pytest.approx(1.3**0.70 * before, rel=1e-3)
    assert step("--engine", "torchtitan", "--no-calibration") == before
    text = run(*TRAIN, "--engine", "torchtitan")
    assert "calibration step_s 1.20 from 1 run (score --calibrate)" in text
    assert "calibration" not in run(*TRAIN)  # of another engine
    assert "from 1 run on other models" in run(
        *(*TRAIN[:2], "Qwen3-8B", *TRAIN[3:], "--engine", "torchtitan")
    )
    price = run("explain", "price", "Llama-3.2-1B", "-m", "8xH100", "--engine", "torchtitan")
    assert "calibration step_s x 1.202" in price
    assert run("score", "--calibrate", "--forget") == "forgotten"
    assert step("--engine", "torchtitan") == before
    assert run("score", "--calibrate", "--forget") == "no calibration is stored"


def test_a_served_benchmark_corrects_latencies() -> None:
    run(*SERVE, *SHORT, "--out", "plan.yaml")
    plan = ServePlan.load(Path("plan.yaml"))
    tpot = plan.predicted["tpot_p50_s"].value
    Path("serve.json").write_text(
        json.dumps({"median_tpot_ms": 1.5e3 * tpot, "output_throughput": 1000.0})
    )
    run("score", "--import", "serve.json", "--plan", "plan.yaml", "--format", "vllm")
    run("score", "--calibrate")
    assert "calibration tpot 1.19 from 1 run (score --calibrate)" in run(*SERVE, *SHORT)
    run(*SERVE, *SHORT, "--out", "again.yaml")
    again = ServePlan.load(Path("again.yaml"))
    assert again.predicted["tpot_p50_s"].value == pytest.approx(1.5**0.42 * tpot)
    assert again.estimate is not None and plan.estimate is not None
    assert again.estimate.memory_bytes == plan.estimate.memory_bytes


def test_a_damaged_file_is_named_and_the_plan_goes_on(home: Path) -> None:
    imported()
    run("score", "--calibrate")
    before = step("--engine", "torchtitan", "--no-calibration")
    (home / "calibration.json").write_text('{"version": 99}')
    done = CliRunner().invoke(app, [*TRAIN, "--engine", "torchtitan", "--top", "1", "-o", "json"])
    assert "calibration.json: version 99" in done.stderr
    assert json.loads(done.stdout)[0]["estimate"]["step_s"]["value"] == before


def test_bad_input() -> None:
    with pytest.raises(StoreError, match="score --import LOG --plan PLAN"):
        run("score", "--calibrate")
    imported()
    with pytest.raises(StoreError, match="score of 4xA100 has no run"):
        run("score", "--calibrate", "-m", "4xA100")
    with pytest.raises(ConfigError, match="shoal score --calibrate"):
        run(*TRAIN, "--calibrate")
    with pytest.raises(ConfigError, match="--forget"):
        run("score", "--forget")
    with pytest.raises(ConfigError, match="after --import"):
        run("score", "--calibrate", "--import", "train.log")
