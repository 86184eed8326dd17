"""``shoal explain routes``: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError
from shoal.plan.routes.network import WanNetwork, WanNode


@pytest.fixture
def net(tmp_path: Path) -> Path:
    file = tmp_path / "net.yaml"
    WanNetwork.wan(6).save(file)
    return file


def shoal(file: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["routes", str(file), *map(str, words)])


def test_shows_stages_routes_and_timeline(net: Path) -> None:
    done = shoal(net, "--stages", 3, "--keep", 2, "--microbatches", 4, "--effort", 2)
    assert done.exit_code == 0, done.output
    assert "wan-6: 2 of 3 stages, step " in done.stdout
    assert "seoul-0" in done.stdout
    assert "micro-batch" in done.stdout
    assert "F0" in done.stdout


def test_json_and_files_say_the_same(net: Path, tmp_path: Path) -> None:
    svg, html, trace = (tmp_path / name for name in ("r.svg", "routes.html", "routes.json"))
    done = shoal(
        net,
        *("--stages", 3, "--keep", 2, "--swap", "--microbatches", 4, "--effort", 2),
        *("--picture", svg, "--out", tmp_path, "-o", "json"),
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert sum(len(stage) for stage in data["stages"]) == 6
    assert all(route["stages"][0] == 0 for route in data["routes"])
    assert max(event["end"] for event in data["events"]) == pytest.approx(data["step_s"])
    assert data["step_s"] <= data["planned_s"] * 1.01
    ElementTree.fromstring(svg.read_text())
    assert "<html" in html.read_text()
    assert json.loads(trace.read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stages", 3, "--keep", 4), "keep = 4: expected 1 to 3"),
        (("--stages", 7), "at least 7, one for each stage"),
        (("--stages", 3, "--sizes", "[2, x]"), "sizes"),
        (("--stages", 3, "--sizes", "[2, 2]"), "3 numbers, one for each stage"),
        (("--stages", 3, "--sizes", "[2, 2, 1]"), "add up to 6 nodes"),
        (("--stages", 3, "--forward", 0), "forward_s"),
        (("--stages", 3, "--in-flight", 0), "binding constraint"),
        (("--microbatches", 0), "microbatches = 0"),
    ],
)
def test_refuses_with_a_reason(net: Path, words: tuple[object, ...], said: str) -> None:
    done = shoal(net, *words)
    assert isinstance(done.exception, ShoalError), done.output
    assert said in str(done.exception)


def test_disconnected_nodes_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    WanNetwork(nodes=(WanNode(name="a", region="ohio"), WanNode(name="b"))).save(file)
    done = shoal(file, "--stages", 2)
    assert isinstance(done.exception, ShoalError), done.output
    assert "b without a way to a" in str(done.exception)
