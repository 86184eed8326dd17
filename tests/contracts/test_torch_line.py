"""Below the torch line nothing needs torch, and every room imports quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

from .conftest import ROOMS, TORCH_FREE

SOURCE = Path(shoal.__file__).parent


def modules(room: str) -> list[str]:
    root = SOURCE.joinpath(*room.split(".")[1:])
    return sorted(
        ".".join(("shoal", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in root.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )


BELOW = [module for room in TORCH_FREE for module in modules(room)]


def test_every_module_imports_without_torch(without_torch: dict[str, dict[str, str]]) -> None:
    complaints = {module: without_torch["imports"][module] for module in BELOW}
    assert {module: said for module, said in complaints.items() if said} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_door_opens_without_torch(room: str, without_torch: dict[str, dict[str, str]]) -> None:
    assert without_torch["doors"][room] == ""


def test_the_rooms_are_all_here() -> None:
    assert {f"shoal.{path.parent.name}" for path in SOURCE.glob("*/__init__.py")} == set(ROOMS)


def cpu_seconds(arguments: list[str]) -> float:
    """Processor time of a new Python, which a busy machine changes little."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        env={key: value for key, value in os.environ.items() if not key.startswith("COV")},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [(["-c", "import shoal"], 0.2), (["-m", "shoal", "--help"], 0.6)],
    ids=["import", "help"],
)
def test_is_quick(arguments: list[str], limit_s: float) -> None:
    """The best of up to ten tries: anything but the program itself only adds time."""
    best = float("inf")
    for _ in range(10):
        best = min(best, cpu_seconds(arguments))
        if best < limit_s:
            return
    pytest.fail(f"{' '.join(arguments)}: {best:.2f} s of processor time, wanted {limit_s} s")


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['shoal', '--help']\n"
        "from shoal.app.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'pyarrow', 'transformers', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
