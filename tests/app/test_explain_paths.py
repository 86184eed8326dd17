"""``shoal explain paths``: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from shoal.app.commands.explain import app
from shoal.core.errors import ShoalError

SMALL = ("--leaves", 4, "--hosts", 4, "--spines", 4)


def shoal(*words: object) -> Result:
    return CliRunner().invoke(app, ["paths", *map(str, words)])


def test_shows_policies_fastest_first() -> None:
    done = shoal(*SMALL, "--policy", "ecmp", "--policy", "split")
    assert done.exit_code == 0, done.output
    assert "all_reduce of 1.00 GB by ring" in done.stdout
    assert done.stdout.index("split") < done.stdout.index("ecmp")


def test_json_and_picture(tmp_path: Path) -> None:
    svg = tmp_path / "loads.svg"
    done = shoal(*SMALL, "--policy", "all", "--picture", svg, "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    took = {row["policy"]: row["seconds"] for row in data["policies"]}
    assert took["split"] == pytest.approx(took["spray"])
    assert took["ecmp"] >= took["split"] >= data["bound_s"]
    drawn = ElementTree.fromstring(svg.read_text())
    assert "split" in "".join(drawn.itertext())


def test_reads_a_fabric_and_links_that_are_down(tmp_path: Path) -> None:
    file = tmp_path / "fabric.yaml"
    file.write_text("leaves: 4\nhosts: 2\nspines: 2\n")
    done = shoal(file, "--broken", "1-0", "--policy", "all", "-o", "json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["fabric"]["leaves"] == 4
    rows = data["policies"]
    assert "split" not in {row["policy"] for row in rows}
    assert all(row["uplink_bytes"][1][0] == 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "splitt"), "did you mean 'split'"),
        (("--broken", "3"), "LEAF-SPINE"),
        (("--broken", "99-0"), "leaf below 4"),
        (("--collective", "gather"), "all_gather"),
        (("--broken", "1-0=0.5", "--policy", "split"), "lp and c4p plan around"),
        (("--machine", "laptop"), "a machine whose description has a fabric"),
        (("--ranks", 99), "1 to 16 hosts"),
    ],
)
def test_refuses_with_a_reason(words: tuple[object, ...], said: str) -> None:
    done = shoal(*SMALL, *words)
    assert isinstance(done.exception, ShoalError), done.output
    assert said in str(done.exception)
