"""``shoal explain decode`` and ``shoal probe decode``: how many rows pay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.machine.fingerprint import fingerprint
from shoal.plan.serving.decode_measured import MeasuredRow, MeasuredTable, keep
from shoal.plan.trees.drafting import RowCosts

RIGHT = [[0.6, 0.12, 0.06], [0.4, 0.1, 0.06], [0.3, 0.08, 0.05]]


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """The directory of a drafter, of which no more than the config is read."""
    config = {"name": "medusa", "target": "x", "vocab_size": 64, "hidden": 8, "calibration": RIGHT}
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "drafter.json").write_text(json.dumps(config))
    return tmp_path / "drafter"


def table(tmp_path: Path, *seconds: float) -> str:
    RowCosts(rows=(1, 8, 64), seconds_of=seconds).write(tmp_path / "costs.json")
    return str(tmp_path / "costs.json")


def test_best_rows_follow_from_what_they_cost(drafter, tmp_path):
    result = {}
    for name, seconds in {"flat": (1e-3, 1.01e-3, 1.02e-3), "steep": (1e-3, 8e-3, 64e-3)}.items():
        shown = run(
            "explain", "decode", str(drafter), "--costs", table(tmp_path, *seconds), "-o", "json"
        )
        assert shown.exit_code == 0, shown.output
        result[name] = json.loads(shown.output)
    assert result["flat"]["chosen_rows"] > 20
    assert result["steep"]["chosen_rows"] == 1
    rows = result["flat"]["rows"]
    assert rows["1"] == {"tokens": 1.0, "seconds": 1e-3, "over_plain": 1.0}
    assert rows["2"]["tokens"] == pytest.approx(1.6)
    text = run("explain", "decode", str(drafter), "--costs", table(tmp_path, 1e-3, 1.2e-3, 1e-3))
    assert "N* = " in text.output
    assert "steps of 64 rows are given less time" in text.output
    none = run("explain", "decode", str(drafter), "--costs", table(tmp_path, 1e-3, 8e-3, 64e-3))
    assert "N* = 1: plain decoding" in none.output


def test_what_was_measured_is_cited(drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    costs = table(tmp_path, 1e-3, 1.2e-3, 1e-3)
    unknown = run("explain", "decode", str(drafter), "--costs", costs)
    assert "speculative decoding has not been measured on this machine" in unknown.output
    assert "shoal bench decode --model TARGET --methods medusa --drafter medusa=" in unknown.output
    rows = [
        MeasuredRow(method="medusa", batch=batch, speedup=speedup, low=speedup, high=speedup,
                    tokens_per_step=2.0, date="2026-11-23")
        for batch, speedup in ((1, 1.64), (16, 1.0))
    ]  # fmt: skip
    keep(MeasuredTable(target="x", models=("m",), machine=fingerprint(), precision="bf16",
                       rows=tuple(rows)))  # fmt: skip
    outcome = run("explain", "decode", str(drafter), "--costs", costs)
    assert "1.64x with 1 request, 1.00x with 16 requests (2026-11-23)" in outcome.output
    result = run("explain", "decode", str(drafter), "--costs", costs, "-o", "json")
    assert [row["batch"] for row in json.loads(result.output)["measured"]] == [1, 16]
    elsewhere = run("explain", "decode", str(drafter), "--model", "Qwen3-8B", "-m", "H100")
    assert "1.64x with" not in elsewhere.output


def test_prompt_tokens_are_rows_too(drafter, tmp_path):
    path = drafter / "drafter.json"
    costs = table(tmp_path, 1e-3, 1.01e-3, 1.02e-3)
    requests = []
    for ensemble in (1, 2):
        config = json.loads(path.read_text()) | {"name": "ppd", "options": {"ensemble": ensemble}}
        path.write_text(json.dumps(config))
        shown = run("explain", "decode", str(drafter), "--costs", costs, "-o", "json")
        requests.append(json.loads(shown.output)["rows"]["16"]["tokens"])
    assert requests[0] > requests[1] > 1


def test_a_machine_predicts_what_no_table_says(drafter):
    shown = run(
        "explain", "decode", str(drafter), "--model", "Qwen3-8B", "-m", "H100", "-o", "json"
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["chosen_rows"] > 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --costs, or --model"),
        (("--costs", "/nowhere"), "no table of step costs"),
        (("--model", "shoal-27m", "-m", "laptop", "--requests", "0"), "requests = 0"),
        (("--model", "shoal-27m", "-m", "laptop", "--tree", "bush"), "bush"),
    ],
)
def test_bad_input_is_named(words, message, drafter):
    shown = run("explain", "decode", str(drafter), *words)
    assert message in str(shown.exception)


def test_no_drafter_is_named(tmp_path):
    shown = run("explain", "decode", str(tmp_path))
    assert "drafter.json: missing" in str(shown.exception)


def test_probing_needs_a_job_that_guesses(tmp_path):
    assert "give --job" in str(run("probe", "decode").exception)
    job = tmp_path / "serve.yaml"
    job.write_text("model: shoal-4m\n")
    result = run("probe", "decode", "--job", str(job)).exception
    assert "speculative is not set" in str(result)
