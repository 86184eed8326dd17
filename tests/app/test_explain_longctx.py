"""``shoal explain longctx`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["longctx", *map(str, words)])


def test_says_what_long_context_costs() -> None:
    done = shoal("Yi-34B-200K", "--first", "4K", "--last", "10M")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    first = next(line.split() for line in lines if line.split()[:1] == ["4K"])
    assert first[1:3] == ["983", "MB"]
    assert any(line.split()[:1] == ["10M"] for line in lines)
    assert "decode needs cache x 0.004" in done.stdout
    assert "window=4096" in done.stdout


@pytest.mark.slow
def test_compares_devices_and_draws_them(tmp_path: Path) -> None:
    file = tmp_path / "longctx.svg"
    done = shoal(
        *("Llama-3-8B", "--compare", "a100,h100,h200", "--picture", file, "--last", "64K"),
        *("--users", 4, "--first", "8K", "-o", "json"),
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)["devices"]
    assert len(data) == 3
    answers = [one["rows"][0]["answer_s"] for one in data.values()]
    assert answers == sorted(answers, reverse=True)
    for one in data.values():
        per_hour = one["sessions_per_hour"]["8000"]
        assert 0 < per_hour["simulated"] <= per_hour["closed_form"]
    assert file.read_text(encoding="utf-8").count("<svg") == 5


def test_a_smaller_cache_holds_more_users() -> None:
    def users(*words: str) -> float:
        done = shoal("Llama-3-8B", "--first", "32K", "--last", "32K", "-o", "json", *words)
        assert done.exit_code == 0, done.output
        (device,) = json.loads(done.stdout)["devices"].values()
        return float(device["rows"][0]["users"])

    assert users("--reduce", "bits=4") > 3.9 * users()
    assert users("--kv", "int4") > 3.9 * users()
