"""An import goes only to a lower floor, without exemptions."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import shoal

ROOT = Path(__file__).parents[2]


def settings() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
        "importlinter"
    ]
    return found


def test_import_linter_passes() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_every_room_has_a_floor_and_no_import_is_exempt() -> None:
    contracts = settings()["contracts"]
    assert isinstance(contracts, list)
    layers = next(contract for contract in contracts if contract["type"] == "layers")
    rooms = {
        f"shoal.{path.parent.name}" for path in Path(shoal.__file__).parent.glob("*/__init__.py")
    }
    assert rooms == set(layers["layers"])
    assert not any("ignore_imports" in contract for contract in contracts)
