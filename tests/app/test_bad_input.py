"""Bad input of planning and scoring: one line that names the fix, and nothing half-written."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.app.show import wait_until_quiet
from shoal.core.errors import NoisyMachineError, ShoalError
from shoal.machine.described import load

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    home = tmp_path / "home"
    home.mkdir()
    load("laptop").save(home / "machine.yaml")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    yield


def refused(*words: str, parts: tuple[str, ...]) -> None:
    """One line with these parts, and no file more than before."""
    before = sorted(Path().iterdir())
    done = RUN.invoke(app, list(words))
    assert isinstance(done.exception, ShoalError), (done.output, done.exception)
    said = str(done.exception)
    assert "\n" not in said
    for part in parts:
        assert part in said, said
    assert sorted(Path().iterdir()) == before


def describe(**changes: object) -> None:
    """``m.yaml``, a machine of one GPU without price and power."""
    device = {
        "name": "A100",
        "kind": "gpu",
        "peak_flops": {"bf16": 3.12e14, "fp32": 1.95e13},
        "matmul_flops": {"bf16": 2.4e14, "fp32": 1.7e13},
        "memory": [
            {
                "name": "hbm",
                "capacity_bytes": 80_000_000_000,
                "read_bandwidth": 2e12,
                "write_bandwidth": 2e12,
            }
        ],
    }
    result: dict[str, object] = {"name": "cluster", "device": device}
    for path, value in changes.items():
        *way, last = path.split("__")
        at: dict[str, object] = result
        for key in way:
            at = at[key]  # type: ignore[assignment]
        if value is None:
            del at[last]
        else:
            at[last] = value
    Path("m.yaml").write_text(yaml.safe_dump(result))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"nodes": 0}, ("m.yaml", "nodes = 0", "above 0")),
        ({"device__power_watts": float("inf")}, ("device.power_watts = inf", "finite")),
        ({"device__matmul_flops": {"bf16": 9e14}}, ("above peak_flops.bf16", "correct one")),
        ({"device__memory": None}, ("device.memory: missing", "give a value")),
        ({"device__memory": [{"name": "hbm", "capacity_bytes": 80}]}, ("no model fits", "bytes")),
        (
            {"device__memory": [{"name": "hbm", "capacity_bytes": 8 * 10**10}]},
            ("add it in byte/s",),
        ),
        ({"device__matmul_flops": {}, "device__peak_flops": {}}, ("add the rate in FLOP/s",)),
        ({"devices_per_node": 4}, ("no link of scope device",)),
        ({"devices_per_nod": 4}, ("devices_per_nod: no such key", "did you mean")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_impossible_or_missing_numbers_of_a_machine(
    changes: dict[str, object], parts: tuple[str, ...]
) -> None:
    describe(**changes)
    words = ("plan", "train", "shoal-4m", "--tokens", "2M", "-m", "m.yaml", "--out", "p.yaml")
    refused(*words, parts=parts)


@pytest.mark.parametrize(
    ("objective", "parts"),
    [
        ("cost", ("objective = cost", "no usd_per_device_hour", "describe a price")),
        ("energy", ("objective = energy", "no device.power_watts", "describe a draw")),
    ],
)
@pytest.mark.parametrize("more", [(), ("--fit",)])
def test_an_objective_without_its_numbers(
    objective: str, parts: tuple[str, ...], more: tuple[str, ...]
) -> None:
    describe()
    words = ("plan", "train", "shoal-4m", "-m", "m.yaml", "--tokens", "2M", "--out", "p.yaml")
    refused(*words, "--objective", objective, *more, parts=parts)


def test_a_model_that_fits_under_no_plan_says_by_how_much_and_what_would_help() -> None:
    done = RUN.invoke(app, ["plan", "train", "Llama-3-70B", "-m", "RTX-4090", "--fit"])
    assert done.exit_code == 1
    assert "a rank needs" in done.output
    assert "may fill" in done.output
    assert "this would: offload: zero_infinity" in done.output
    done = RUN.invoke(app, ["plan", "train", "Qwen3-8B", "-m", "2xH100", "--fit"])
    assert done.exit_code == 1
    assert "this would: " in done.output


@functools.cache
def planned() -> str:
    """The text of a plan of this machine; every test here has the same."""
    words = ["plan", "train", "shoal-4m", "--tokens", "2M", "--out", "plan.yaml"]
    assert RUN.invoke(app, words).exit_code == 0
    return Path("plan.yaml").read_text()


@pytest.fixture
def saved() -> dict[str, object]:
    """A plan of this machine, as a dictionary."""
    Path("plan.yaml").write_text(planned())
    data: dict[str, object] = yaml.safe_load(Path("plan.yaml").read_text())
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("job.parallel.tp", 3, ("plan.yaml: parallel.tp = 3", "divisor")),
        ("job.parallel.pp", 99, ("plan.yaml: parallel.pp = 99", "at most")),
        ("job.parallel.vpp", 2, ("parallel.vpp = 2", "with schedule 1f1b")),
        ("job.parallel.dp", 7, ("parallel.dp = 7", "make global_batch a multiple")),
        ("job.parallel.dp", -1, ("job.parallel.dp = -1", "above 0")),
        ("job.microbatch", 5, ("plan.yaml: microbatch = 5", "give a divisor")),
        ("job.parallel.schedule", "1f2b", ("schedule = '1f2b'", "1f1b")),
        ("job.parallel.dq", 2, ("job.parallel.dq: no such key", "did you mean 'dp'")),
        ("job.model", "shoal-8m", ("another model", "(hash ", "hidden is", "plan again")),
        ("shape.num_layers", 99, ("another model", "num_layers is 99", "plan again")),
        ("machine.device.name", "Z80", ("another machine", "device.name is 'Z80'", "(hash ")),
    ],
)
def test_a_plan_that_is_not_for_here(
    saved: dict[str, object], path: str, value: object, parts: tuple[str, ...]
) -> None:
    *way, last = path.split(".")
    at = saved
    for key in way:
        at = at[key]  # type: ignore[assignment]
    at[last] = value
    Path("plan.yaml").write_text(yaml.safe_dump(saved))
    refused("train", "--plan", "plan.yaml", parts=parts)


@pytest.mark.slow
@pytest.mark.parametrize("probed", [True, False])
def test_a_plan_for_gpus_does_not_run_on_a_cpu(
    probed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not with its machine named, and not where nobody probed this one."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["plan", "train", "shoal-4m", "-m", "8xH100", "--tokens", "9M", "--out", "plan.yaml"]
    assert RUN.invoke(app, words).exit_code == 0
    if not probed:
        (tmp_path / "home" / "machine.yaml").unlink()
        refused("train", "--plan", "plan.yaml", parts=("8xH100", "GPUs", "CPU", "--anyway"))
    refused(
        "train", "--plan", "plan.yaml", "--machine", "8xH100", parts=("8xH100", "GPUs", "--anyway")
    )
    Path("job.yaml").write_text("model: shoal-4m\nsteps: 2\n")
    refused("train", "job.yaml", "--machine", "8xH100", parts=("8xH100", "GPUs", "CPU", "--anyway"))


def test_a_plan_for_another_machine_can_be_launched_there() -> None:
    words = ["plan", "train", "shoal-4m", "-m", "8xH100", "--tokens", "9M", "--out", "plan.yaml"]
    assert RUN.invoke(app, words).exit_code == 0
    refused("train", "--plan", "plan.yaml", parts=("8xH100", "device.kind", "--launch"))
    done = RUN.invoke(app, ["train", "--plan", "plan.yaml", "--launch", "slurm"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_plan_has_the_settings_of_its_job() -> None:
    words = ["plan", "train", "shoal-4m", "-m", "laptop", "--tokens", "9M", "--out", "plan.yaml"]
    assert RUN.invoke(app, words).exit_code == 0
    given = ("--lr=1e-3", "--steps=3", "--mesh=dp=2", "--set=seed=2")
    named = ("--lr", "parallel", "--steps", "--set", "shoal plan train --out", "leave")
    refused("train", "--plan", "plan.yaml", *given, parts=named)
    Path("job.yaml").write_text("model: shoal-4m\nsteps: 2\n")
    refused("train", "job.yaml", "--plan", "plan.yaml", parts=("a job with --plan",))
    refused("run", "train", "--plan", "plan.yaml", "--model=shoal-8m", parts=("--model with",))
    refused("run", "train", "x", "--plan", "plan.yaml", parts=("a job with --plan",))


def test_an_architecture_is_one_of_them() -> None:
    for given in ("{residual: ladder, streams: 4}", "{residual: {every: 3}}"):
        Path("job.yaml").write_text(f"model: shoal-4m\nsteps: 2\narchitecture: {given}\n")
        refused("train", "job.yaml", "--dry-run", parts=("expected", "residual"))
        refused("run", "train", "job.yaml", "--dry-run", parts=("expected", "residual"))


def test_what_is_no_plan_is_not_run() -> None:
    Path("plan.yaml").write_text("model: shoal-4m\n")
    refused("train", "--plan", "plan.yaml", parts=("not a plan", "shoal plan train --out"))
    RUN.invoke(app, ["plan", "serve", "shoal-4m", "--out", "serve.yaml", "--no-compare"])
    refused("train", "--plan", "serve.yaml", parts=("the job serve", "shoal run serve --plan"))


@pytest.mark.parametrize(
    ("content", "format_", "parts"),
    [
        (b"", "auto", ("run.log: is empty", "give the log of a run")),
        (b"\n\nhello\nworld\n", "auto", ("run.log, line 3: 'hello'", "--format")),
        (bytes(range(256)) * 9, "auto", ("run.log, line 1: not text", "--format")),
        (b"a,b\n1,2\n", "auto", ("run.log, line 1: 'a,b'", "torchtitan")),
        (b"hello\n", "torchtitan", ("run.log, line 1", "not a log of torchtitan")),
        (b"\0\1\2" * 99, "tensorboard", ("run.log, record 1", "another file")),
        (b"not json\n", "wandb", ("run.log, line 1: 'not json'", "not JSON")),
        (b"hello\n", "nope", ("--format = 'nope'", "torchtitan")),
    ],
)
def test_a_log_that_is_none_names_its_line(
    content: bytes, format_: str, parts: tuple[str, ...]
) -> None:
    Path("run.log").write_bytes(content)
    refused("score", "--import", "run.log", "--format", format_, parts=parts)
    assert not (Path(os.environ["SHOAL_HOME"]) / "score.db").exists()


def test_a_key_of_the_demos_job_is_checked_before_anything_is_done() -> None:
    refused("demo", "--set", "steppes=1", parts=("--set steppes", "no such key", "steps"))


@pytest.mark.parametrize("words", ["train", "run train", "run cluster"])
def test_nothing_to_resume_is_refused(words: str) -> None:
    refused(
        *words.split(),
        "--dir",
        "nowhere",
        "--resume",
        parts=("nowhere: contains no run to resume", f"shoal {words} --dir nowhere"),
    )
    refused(*words.split(), "--resume", parts=(f"shoal {words} --dir DIR --resume",))


def test_a_busy_machine_is_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is waited for, how long, and the flag; in the words of the error too."""
    monkeypatch.setattr("shoal.core.measure.noise_reasons", lambda: ["a compiler runs"])
    with pytest.raises(NoisyMachineError, match=r"a compiler runs; .*--anyway"):
        wait_until_quiet(anyway=False, wait_s=0.05)
    said = capfd.readouterr().err
    assert "waiting up to 0 s for a quiet machine: a compiler runs; --anyway" in said
    assert "0 s left" in said
    wait_until_quiet(anyway=True)
