"""A save that is killed anywhere leaves a loadable checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.checkpoint import SAVE_MODES

WRITER = Path(__file__).with_name("crashing_writer.py")


def killed(mode: str, root: Path) -> int:
    done = subprocess.run(
        [sys.executable, str(WRITER), mode, str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.multi
def test_killed_at_every_call_to_the_file_system(tmp_path: Path) -> None:
    assert killed("calls", tmp_path) >= 50


@pytest.mark.multi
@pytest.mark.slow
def test_killed_at_random_moments(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    kills = killed("moments", tmp_path / "run")
    assert kills >= 50
    record_property("figure", f"{kills} kills, {kills} times a verified checkpoint loads")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("mode", [mode for mode in SAVE_MODES if mode != "blocking"])
def test_killed_at_random_moments_of_saving_behind(mode: str, tmp_path: Path) -> None:
    assert killed(mode, tmp_path / "run") >= 50
