"""An import goes only to a lower floor, without exemptions; a string that names a module is one."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.core.parts import KINDS, table

from . import graph

ROOT = Path(__file__).parents[2]


@functools.cache
def settings() -> dict[str, object]:
    settings: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]
    return settings


def test_import_linter_passes() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def layers() -> list[str]:
    """Rooms from the top to the ground."""
    contracts = settings()["contracts"]
    assert isinstance(contracts, list)
    layers: list[str] = next(one for one in contracts if one["type"] == "layers")["layers"]
    return layers


def test_every_room_has_a_floor_and_no_import_is_exempt() -> None:
    contracts = settings()["contracts"]
    assert isinstance(contracts, list)
    rooms = {
        f"shoal.{path.parent.name}" for path in Path(shoal.__file__).parent.glob("*/__init__.py")
    }
    assert rooms == set(layers())
    assert not any("ignore_imports" in contract for contract in contracts)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def upwards(module: str) -> Iterator[str]:
    """What a module names on a higher floor: by an import anywhere, or by a string."""
    floors = layers()
    for line, to in graph.edges(module):
        if room_of(to) in floors and floors.index(room_of(to)) < floors.index(room_of(module)):
            yield f"{module}, line {line}: {to}"


@pytest.mark.parametrize("room", layers())
def test_nothing_above_is_named(room: str) -> None:
    modules = [module for module in graph.modules() if room_of(module) == room]
    assert [named for module in modules for named in upwards(module)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_parts_lie_no_higher_than_their_table(kind: str) -> None:
    floors = layers()
    floor = floors.index(room_of(KINDS[kind].partition(":")[0]))
    parts = [path for path in table(kind).values() if path.startswith("shoal.")]
    assert [path for path in parts if floors.index(room_of(path.partition(":")[0])) < floor] == []


@pytest.mark.parametrize(
    "text",
    [
        "x = 'shoal.train.worker'",
        "def f():\n    import shoal.serve.kind",
        "x = 'shoal.app.cli:main'",
    ],
)
def test_a_name_above_is_seen(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"shoal.machine.{abs(hash(text))}"
    monkeypatch.setitem(graph.modules(), module, tmp_path / "module.py")
    graph.modules()[module].write_text(text)
    assert len(list(upwards(module))) == 1
