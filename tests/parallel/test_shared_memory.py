"""Collectives through shared memory equal sums in rank order, and never wait for the dead."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.parallel.comm import shared_memory


@pytest.mark.multi
@pytest.mark.skipif(platform.machine() != "x86_64", reason="shared memory serves x86 only")
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_collectives(tmp_path: Path, world: int) -> None:
    program = Path(__file__).with_name("ranks_shared_memory.py")
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", program, tmp_path],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for rank in range(world)
    ]
    assert [child.wait(timeout=120) for child in children] == [0] * world
    assert len(list(tmp_path.glob("done-*"))) == world


def test_no_room_left_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared_memory._create(8192, 8192) == (-1, b"")
    assert list(tmp_path.iterdir()) == []


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert shared_memory._create(8192, 8192) == (-1, b"")


def test_a_file_of_another_size_is_not_opened(tmp_path: Path) -> None:
    other = tmp_path / "shoal-x"
    other.write_bytes(b"short")
    assert shared_memory._open(os.fsencode(other), 8192) == -1
    link = tmp_path / "link"
    link.symlink_to(other)
    assert shared_memory._open(os.fsencode(link), 8192) == -1


def test_a_process_that_ended_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not collected: a zombie
    assert not shared_memory.runs(child.pid)
    child.wait()
    assert not shared_memory.runs(child.pid)
    assert shared_memory.runs(os.getpid())
