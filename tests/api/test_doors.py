"""A job is the same whichever way it comes in: flags, YAML, Python values, the dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

import shoal
from shoal.api import planning
from shoal.app.commands.plan import app
from shoal.app.dash import explore
from shoal.ir import Job, Plan, ServeJob, TrainJob
from shoal.machine.described import load
from shoal.plan.defaults import settled_serving, settled_training

MODELS = ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-14B", "Llama-3.1-70B", "shoal-4m", "DeepSeek-V3")
MACHINES = ("laptop", "1xH100", "16xH100", "64xA100", "2048xH800")


@pytest.fixture(scope="module")
def answers() -> dict[type[Job], Plan[Any]]:
    """A plan of either kind, in the place of those that a search would find."""
    train = shoal.plan("shoal-0.3m", "laptop", steps=10).best
    serve = shoal.plan("shoal-0.3m", "laptop", kind="serve", requests=2, compare=False).best
    return {TrainJob: train, ServeJob: serve}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, answers: dict[type[Job], Plan[Any]]) -> list[Job]:
    """The jobs that are planned; nothing is searched for them."""
    jobs: list[Job] = []

    def ranked(kind: Any, job: Job, machine: Any, **options: Any) -> list[Plan[Any]]:
        jobs.append(job)
        return [answers[type(job)]]

    monkeypatch.setattr(planning, "ranked", ranked)
    monkeypatch.setattr(explore, "content", lambda plans, answers: {})
    return jobs


def asked(*words: object) -> None:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    model=st.sampled_from(MODELS),
    machine=st.sampled_from(MACHINES),
    tokens=st.sampled_from([None, "2M", "20M", "300M", "20B"]),
    seq_len=st.sampled_from([None, 128, 2048]),
    batch=st.sampled_from([None, 64, 512]),
)
def test_a_training_job_is_one_job(
    seen: list[Job],
    tmp_path: Path,
    model: str,
    machine: str,
    tokens: str | None,
    seq_len: int | None,
    batch: int | None,
) -> None:
    given = {"tokens": tokens, "seq_len": seq_len, "global_batch": batch}
    given = {name: value for name, value in given.items() if value is not None}
    seen.clear()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    asked("train", model, "-m", machine, *flags)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({"model": model, **given}))
    asked("train", file, "-m", machine)
    shoal.plan(model, machine, **given)
    shoal.plan({"model": model, **given}, load(machine))
    shoal.plan(TrainJob.model_validate({"model": model, **given}), machine)
    form = {"seq_len": "", "global_batch": "", "tokens": "", **given}
    explore._answer.cache_clear()
    page = explore.explore(
        {"model": model, "machine": machine, **{k: str(v) for k, v in form.items()}}
    )
    assert page["error"] == ""
    plain = settled_training(TrainJob.model_validate({"model": model, **given}), load(machine))
    assert len(seen) == 6
    assert {json.dumps(job.model_dump(mode="json")) for job in [*seen, plain]} == {
        json.dumps(plain.model_dump(mode="json"))
    }


def test_a_serving_job_is_one_job(seen: list[Job], tmp_path: Path) -> None:
    for model, machine in (
        ("Qwen3-8B", "1xH100"),
        ("DeepSeek-V3", "16xH200"),
        (MODELS[0], "laptop"),
    ):
        seen.clear()
        asked("serve", model, "-m", machine, "--workload", "chat", "--rate", 3)
        file = tmp_path / "job.yaml"
        file.write_text(f"job: serve\nmodel: {model}\nworkload: {{name: chat, rate: 3}}\n")
        asked("serve", file, "-m", machine)
        workload = {"name": "chat", "rate": 3}
        shoal.plan(model, machine, kind="serve", workload=workload)
        shoal.plan({"job": "serve", "model": model, "workload": workload}, machine)
        job = ServeJob.model_validate({"model": model, "workload": workload})
        shoal.plan(job, machine)
        plain = settled_serving(job, load(machine))
        assert len(seen) == 5 and {one == plain for one in seen} == {True}


def test_what_a_gpu_changes() -> None:
    def settled(machine: str, **given: Any) -> TrainJob:
        return settled_training(TrainJob(**given), load(machine))

    assert settled("laptop") == TrainJob(steps=1000)
    whole = settled("16xH100", model="Llama-3.1-8B")
    assert (whole.seq_len, whole.global_batch, whole.optimizer.options) == (4096, 128, {"lr": 3e-4})
    assert settled("2048xH800", model="Llama-3.1-8B").global_batch == 2048
    # Twenty million tokens are a hundred steps.
    assert settled("16xH100", model="Llama-3.1-8B", tokens="20M").global_batch == 32
    # The rates of Llama 3 for its larger sizes, and of QLoRA.
    rates = {"Llama-3.1-70B": 1.5e-4, "Llama-3.1-405B": 8e-5}
    for model, rate in rates.items():
        lr = settled("64xH100", model=model).optimizer.options["lr"]
        assert lr == pytest.approx(rate, rel=0.07)
    tuned = settled("1xH100", model="Llama-3.1-8B", finetune="lora")
    assert tuned.optimizer.options == {"lr": 2e-4}
    # What somebody has set stays, and other optimizers have rates of their own.
    own = {"optimizer": {"name": "adamw", "lr": 1e-3}, "seq_len": 64, "checkpoint": {"every": 7}}
    kept = settled("16xH100", model="Llama-3.1-8B", **own)
    assert (kept.optimizer.options, kept.seq_len, kept.checkpoint.every) == ({"lr": 1e-3}, 64, 7)
    assert kept.checkpoint.mode.name == "snapshot"
    assert settled("16xH100", optimizer="muon").optimizer.options == {}
    assert settled_training(kept, load("16xH100")) is kept


def test_a_number_of_tokens_is_written_as_people_write_it() -> None:
    assert TrainJob(tokens="20B").tokens == 20_000_000_000  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="such as 300M"):
        TrainJob(tokens="many")  # type: ignore[arg-type]
    assert TrainJob.model_validate({"precision": "fp8"}).products == "fp8"
