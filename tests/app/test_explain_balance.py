"""``shoal explain balance``: what it shows and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text(" ".join(map(str, [60_000, 20_000, *range(100, 3_000, 10)])))
    return path


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["balance", *map(str, words)])


def test_the_fastest_is_first(lengths: Path, tmp_path: Path) -> None:
    done = shoal(lengths, "--limit", 0, "--picture", tmp_path / "step.svg")
    assert done.exit_code == 0, done.output
    assert "292 sequences of up to 60,000 tokens" in " ".join(done.stdout.split())
    assert all(name in done.stdout for name in ("bytescale", "flexsp", "packed"))
    assert (tmp_path / "step.svg").read_text().startswith("<svg")


def test_for_programs(lengths: Path) -> None:
    done = shoal(lengths, "--limit", 0, "--ranks", 16, "--offload", "-o", "json")
    data = json.loads(done.stdout)
    plans = data["plans"]
    assert set(plans) == {"packed", "bytescale", "flexsp"} and not data["refused"]
    assert plans["bytescale"]["step_s"] < plans["packed"]["step_s"]
    assert plans["bytescale"]["attention_bytes"] < plans["packed"]["attention_bytes"]
    assert list(plans) == sorted(plans, key=lambda name: plans[name]["step_s"])


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--ranks", 2), "smallest group that could has 8 ranks"), (("--model", "no"), "no")],
)
def test_bad_input(lengths: Path, words: tuple[object, ...], told: str) -> None:
    done = shoal(lengths, *words)
    assert isinstance(done.exception, ShoalError) and told in str(done.exception)
