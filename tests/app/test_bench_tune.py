"""``shoal bench tune``."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("torch")

from traces import write_trace

from shoal.app.commands.bench import app
from shoal.ir import Arrival, ServeJob
from shoal.plan.tune.protocols import TuningResult


def tune(*words: str) -> Result:
    return CliRunner().invoke(app, ["tune", "shoal-0.3m", *words])


@pytest.mark.slow
def test_writes_the_best_and_the_landscape(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, [Arrival(0.01 * n, (1, 2, 3 + n), 4) for n in range(4)])
    best, study, picture = (tmp_path / name for name in ("best.yaml", "study.yaml", "tune.html"))
    words = ["--trace", str(trace), "--budget", "30s", "--tuner", "exhaustive", "--anyway"]
    words += ["--knob", "max_running=1,4", "--knob", "max_step_tokens=64", "--knob", "block_size=8"]
    words += ["--knob", "kv_tokens=256", "--set", "threads=1", "--width", "9", "-q", "-o", "json"]
    files = ["--out", str(best), "--study", str(study), "--picture", str(picture)]
    before = multiprocessing.active_children()
    done = tune(*words, *files)
    assert done.exit_code == 0, done.output
    assert multiprocessing.active_children() == before, "the engine's process has ended"
    data = json.loads(done.stdout)
    assert data["configurations"] == len(data["trials"]) == 2
    job = ServeJob.load(best)
    assert job.max_running == data["best"]["config"]["max_running"]
    assert (job.threads, job.kv_tokens, job.kv.options) == (1, 256, {"block_size": 8})
    assert TuningResult.load(study).best.config == data["best"]["config"]
    assert "<svg" in picture.read_text()
    again = tune(*words[:-2], "--warm", str(study))
    assert again.exit_code == 0, again.output
    assert "2 of 2 configurations tried, 0 failed" in " ".join(again.output.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "soon"), "--budget = 'soon'"),
        (("--goal", "speed"), "--goal = 'speed'"),
        (("--engine", "vlm"), "--engine = 'vlm'"),
        (("--knob", "max_runing=4"), "did you mean 'max_running'"),
        (("--knob", "max_running="), "knob=value"),
        (("--engine", "transformers", "--knob", "bach=4"), "did you mean 'batch'"),
        (("--engine", "transformers", "--out", "x.yaml"), "keep the trials with --study"),
        (("--engine", "transformers"), "needs a Hugging Face directory"),
        (("--tuner", "best"), "tuner"),
        (("--width", "0"), "repeats.width"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str) -> None:
    done = tune(*words)
    assert done.exit_code != 0
    assert message in str(done.exception)
