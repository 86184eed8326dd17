"""``shoal plan train``: objectives, whether it fits, what would help, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.app.cli import app

RUN = CliRunner()


@pytest.mark.slow
def test_an_objective_is_the_jobs(tmp_path: Path) -> None:
    done = RUN.invoke(
        app,
        ["plan", "train", "Qwen3-0.6B", "-m", "64xH100@ETH10", "--objective", "cost", "-o", "json"],
    )
    assert done.exit_code == 0, done.output
    best = json.loads(done.stdout)[0]
    assert best["job"]["objective"] == "cost"
    assert best["why"].startswith("cheapest of")


@pytest.mark.slow
def test_fit_says_no_with_status_1_and_what_would() -> None:
    done = RUN.invoke(app, ["plan", "train", "Llama-3-70B", "-m", "8xRTX-4090", "--fit"])
    assert done.exit_code == 1
    assert "Llama-3-70B does not fit on 8xRTX-4090" in done.output
    assert "this would: " in done.output
    done = RUN.invoke(app, ["plan", "train", "Qwen3-0.6B", "-m", "H100", "--fit"])
    assert done.exit_code == 0
    assert "Qwen3-0.6B fits on H100" in done.output


@pytest.mark.slow
def test_what_if_and_picture(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    done = RUN.invoke(
        app,
        ["plan", "train", "Qwen3-0.6B", "-m", "8xH100", "--what-if", "--picture", str(page)],
    )
    assert done.exit_code == 0, done.output
    assert "twice the devices" in done.output
    assert "twice the devices" in page.read_text()


def test_a_model_with_short_positions_is_planned_at_its_own_length() -> None:
    done = RUN.invoke(app, ["plan", "train", "GPT-3-175B", "-m", "64xH100", "-o", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["job"]["seq_len"] == 2048


def test_a_wrong_objective_lists_the_right_ones() -> None:
    done = RUN.invoke(app, ["plan", "train", "Qwen3-0.6B", "-m", "H100", "--objective", "speed"])
    assert done.exit_code == 2
    assert "energy" in done.output
