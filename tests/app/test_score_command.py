"""``shoal score``: what people read of it, in 80 columns, and what it leaves out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from dash_home import plan_of
from rich.console import Console
from typer.testing import CliRunner

import shoal
from shoal.app.cli import app
from shoal.core.tables import rich_table
from shoal.cost.score import Score
from shoal.cost.score_rows import ScoreRow
from shoal.cost.score_tables import predictions_table
from shoal.ir import TrainReport

RUN = CliRunner()


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    for name, finished in (("first", 1.0), ("a-run-with-a-rather-long-name", 1.0), ("third", 0.0)):
        measured = {
            "step_s": 0.021,
            "tokens_per_s": 195_000.0,
            "memory_bytes": 2.5e9,
            "finished": finished,
            "steps": 30.0,
        }
        Score().append(TrainReport(plan=plan_of(name), measured=measured))


def shown(*words: str) -> str:
    done = RUN.invoke(app, ["score", *words])
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    return done.output


def test_people_read_units_in_80_columns() -> None:
    text = shown()
    plain = " ".join(text.split())
    for part in (
        "first step time 20.0 21.0 ms +5.0 %",
        "a-run-with-… tokens per second 205,000 195,000 tok/s -4.8 %",
        "first memory per rank 0.0503 2.50 GB +4,870 %",
        "3 rows are excluded",
    ):
        assert part in plain, text
    for internal in ("finished", "memory_bytes", "stopped before"):
        assert internal not in text
    assert "third" not in text


def test_no_row_wraps() -> None:
    names = ("wire_bytes", "tokens_per_s", "ttft_p95_s", "step_s")
    rows = [
        ScoreRow(
            recorded_s=0.0,
            name="a-run-with-a-rather-long-name",
            model="m",
            machine="cpu",
            quantity=name,
            predicted=2345.0,
            measured=234567.0,
        )
        for name in names
    ]
    text = io.StringIO()
    Console(file=text, width=80).print(rich_table(predictions_table(rows), titled=False))
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    assert len(lines) == 2 + len(names), text.getvalue()
    assert "TTFT p95" in text.getvalue()


def test_python_shows_the_same_tables() -> None:
    score = shoal.score()
    text = io.StringIO()
    Console(file=text, width=80).print(score)
    assert "step time" in text.getvalue() and "median size" in text.getvalue()
    assert "<td" in score._repr_html_()
    assert "score of 6 predictions" in repr(score)


def test_all_says_why_and_repair_judges_again() -> None:
    assert "stopped before its last step" in shown("--all")
    for words in (["score", "--repair"], ["score", "repair"]):
        assert "0 rows excluded, 0 rows included" in RUN.invoke(app, words).output
    rows = json.loads(RUN.invoke(app, ["score", "-o", "json", "--last", "99"]).stdout)["rows"]
    assert {row["left_out"] for row in rows if row["name"] == "third"} == {
        "stopped before its last step"
    }
