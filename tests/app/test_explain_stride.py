"""``shoal explain stride``: what it shows and refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError

H100 = ("--host", 1.5e9, "--device", 25e9, "--link", 12e9)


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["stride", *map(str, words)])


def test_the_best_is_first_and_compared() -> None:
    done = shoal(*H100)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "2,000,000,000 parameters in 20 sub-groups" in done.stdout
    assert lines[-1].startswith("every 4. on the host: 3.85x the host alone")


def test_for_programs() -> None:
    done = shoal(*H100, "--residents", 4, "--half-duplex", "-o", "json")
    data = json.loads(done.stdout)
    assert data["chosen"]["seconds"] <= data["host_only_s"]
    assert data["chosen"]["pattern"]["residents"] == 4
    assert len(data["played"]) == 1 + 2 * 15


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--link", 0), "link = 0"),
        (("--sub-group", 1), "--sub-group"),
        (("--residents", 21), "static_residents = 21: there are 20"),
    ],
)
def test_bad_input(words: tuple[object, ...], told: str) -> None:
    done = shoal(*H100, *words)
    assert isinstance(done.exception, ShoalError) and told in str(done.exception)
