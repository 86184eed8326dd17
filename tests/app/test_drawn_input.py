"""Drawn bad inputs by every way in: no trace, with torch and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drawn import LEAST
from shoal.machine.described import load


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and a home with a machine."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    load("laptop").save(home / "machine.yaml")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    monkeypatch.chdir(work)
    return work


def test_bad_input_is_used_or_refused(place: Path) -> None:
    import drawn_input

    drawn_input.every()


@pytest.mark.slow
def test_bad_input_is_used_or_refused_without_torch(place: Path) -> None:
    # Not ``sys.modules["torch"] = None``, from which scipy would take its attributes.
    code = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(name='torch')\n"
        "sys.meta_path.insert(0, Without())\n"
        "import drawn_input\n"
        "drawn_input.every()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_two_hundred_are_refused() -> None:
    # Each way in has a test that counts its own.
    assert sum(LEAST.values()) >= 200
    assert set(LEAST) == {"command line", "YAML", "Python", "HTTP"}
