"""What a killed process has left behind is removed, though it can remove nothing itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.scratch import SHARED_MEMORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is a part of Linux")

OWNER = """
import os, sys, time
from pathlib import Path
from shoal.core.scratch import SHARED_MEMORY, scratch, shm_name
folder = scratch("janitor-test")
(folder / "inner").mkdir()
shared = SHARED_MEMORY / shm_name("janitor-test")
shared.touch(0o600)
print(folder, shared, flush=True)
if "end" in sys.argv:
    sys.exit()
time.sleep(600)
"""


def owner(tmp_path: Path, *words: str) -> tuple[subprocess.Popen[str], list[Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, *words],
        env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path[1:])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process.stdout:
        return process, [Path(word) for word in process.stdout.readline().split()]


def gone(paths: list[Path], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while any(path.exists() for path in paths):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_files_of_a_killed_process_go(tmp_path: Path, number: signal.Signals) -> None:
    process, paths = owner(tmp_path)
    assert [path.parent for path in paths] == [tmp_path, SHARED_MEMORY]
    assert all(path.exists() for path in paths)
    process.send_signal(number)
    process.wait(30)
    assert gone(paths)


def test_the_next_process_removes_what_was_left(tmp_path: Path) -> None:
    process, paths = owner(tmp_path, "end")
    assert process.wait(30) == 0
    time.sleep(0.3)  # longer than the janitor would take
    assert all(path.exists() for path in paths)
    # The next process that needs such a directory takes them for left behind.
    other, mine = owner(tmp_path)
    assert gone(paths)
    other.kill()
    other.wait()
    assert gone(mine)
