"""``shoal score --import`` and ``shoal plan --emit`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.errors import ConfigError, DataError, PlanError
from shoal.cost.score import Score
from shoal.ir import TrainPlan

LINE = "step: {}  loss: 10.0  memory: 40.00GiB(50.00%)  tps: 5,000  tflops: 300.00  mfu: 30.00%\n"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None:
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def emit(engine: str, *words: str) -> str:
    return run(
        *("plan", "train", "Llama-3.2-1B", "-m", "8xH100", "--tokens", "1B", "--seq-len", "2048"),
        *("--set", "parallel={dp: 8}", "--set", "microbatch=1", "--emit", engine, *words),
    )


def test_emitted_planned_logged_and_scored() -> None:
    emit("torchtitan", "--set", "shard=zero3")
    folder = Path("launch-torchtitan")
    assert {path.name for path in folder.iterdir()} == {"launch.sh", "plan.yaml", "shoal_plan.py"}
    Path("train.log").write_text("".join(LINE.format(i) for i in range(1, 6)))
    text = run("score", "--import", "train.log", "--plan", str(folder / "plan.yaml"))
    assert "a log of torchtitan" in text
    assert "step_s" in text
    plan = TrainPlan.load(folder / "plan.yaml")
    rows = {row.quantity: row for row in Score().rows()}
    wanted = plan.job.global_batch * 2048 / (5000 * 8)
    assert rows["step_s"].measured == pytest.approx(wanted)
    assert plan.estimate is not None
    assert rows["step_s"].predicted == plan.estimate.step_s.value
    assert "torchtitan" not in run("score")


def test_without_a_plan_nothing_is_scored() -> None:
    Path("train.log").write_text("".join(LINE.format(i) for i in range(1, 6)))
    assert "not scored" in run("score", "--import", "train.log")
    data = json.loads(run("score", "--import", "train.log", "-o", "json"))
    assert data["format"] == "torchtitan"
    assert data["measured"]["device_tokens_per_s"] == 5000
    assert Score().rows() == []


def test_the_first_plan_that_the_engine_can_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.app.emitting import write_emitted

    emit("megatron", "--set", "shard=zero1", "--emit-dir", "first")
    plan = TrainPlan.load(Path("first/plan.yaml"))
    muon = plan.job.model_copy(update={"dropout": 0.1})
    write_emitted([plan.model_copy(update={"job": muon}), plan], "deepspeed", Path("second"))
    second = TrainPlan.load(Path("second/plan.yaml"))
    assert second.job == plan.job


def test_serving_is_emitted() -> None:
    run(
        *("plan", "serve", "Llama-3.2-1B", "-m", "H100", "--requests", "8", "--no-compare"),
        *("--set", "max_position=2048", "--emit", "vllm"),
    )
    assert Path("launch-vllm/vllm.yaml").exists()
    Path("serve.log").write_text(
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 1000.0 tokens/s\n" * 3
    )
    run("score", "--import", "serve.log", "--plan", "launch-vllm/plan.yaml", "--format", "vllm")
    assert {row.quantity for row in Score().rows()} >= {"tokens_per_s"}


def test_bad_input() -> None:
    with pytest.raises(PlanError, match="shard = zero1: use replicated, zero2"):
        emit("torchtitan", "--set", "shard=zero1")
    with pytest.raises(ConfigError, match="--emit"):
        emit("torchtitian")
    with pytest.raises(ConfigError, match="expected megatron with --engine nemo"):
        emit("torchtitan", "--engine", "nemo")
    with pytest.raises(DataError, match="--import"):
        run("score", "--import", "none.log")
    Path("train.log").write_text(LINE.format(1))
    Path("not.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="not a plan"):
        run("score", "--import", "train.log", "--plan", "not.yaml")
