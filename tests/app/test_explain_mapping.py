"""``shoal explain mapping``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["mapping", *map(str, words)])


def test_maps_a_sample_and_draws_it(tmp_path: Path) -> None:
    picture, program = tmp_path / "map.svg", tmp_path / "program.yaml"
    words = ("random1", "--fast", "1MiB", "--mapper", "{name: anneal, rounds: 50}")
    done = shoal(*words, "--picture", picture, "--out", tmp_path, "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["tiers"]["fast_bytes"] == 1 << 20
    assert data["bound_s"] <= data["mappers"]["anneal"] <= data["all_slow_s"]
    root = ElementTree.fromstring(picture.read_text())
    drawn = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(drawn) == len(data["rectangles"]) + 1
    again = shoal(program, "--fast", "1MiB", "--mapper", "greedy")
    assert again.exit_code == 0, again.output
    assert "random1: 60 instructions" in again.stdout
    assert "largest stays" in again.stdout


@pytest.mark.slow
def test_maps_a_model() -> None:
    words = ("shoal-0.3m", "--length", 8, "--fast", "256KiB", "--mapper", "greedy")
    done = shoal(*words, "--machine", "laptop", "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["tiers"]["slow_bandwidth"] == 3.8e10
    assert data["mappers"]["greedy"] < data["all_slow_s"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "nobody"),
        (("random1", "--mapper", "best"), "expected one of greedy, milp"),
        (("random1", "--fast", "much"), "is no size"),
        (("random1", "--fast", "0"), "at least 1 byte"),
        (("random1", "--slow-bandwidth", "0"), "slow_bandwidth"),
        (("random1", "--mapper", "milp"), "use hybrid or anneal"),
        (("random1", "--mapper", "{rounds: 5}"), "name"),
        (("random1", "--mapper", "{name: anneal, round: 1}"), "did you mean"),
        (("mlp", "--times", "guessed"), "'model' or 'measured'"),
        (("none.yaml",), "none.yaml"),
    ],
)
def test_refuses(words: tuple[str, ...], said: str) -> None:
    done = shoal(*words)
    assert isinstance(done.exception, ShoalError)
    assert said in str(done.exception)
