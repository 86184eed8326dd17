"""Children end with their parent, and import nothing from the working directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.core import children

HERE = Path(__file__).parent
CANARIES = ["json", "runpy", "ctypes", "signal", "threading", "socket", "subprocess", "shoal"]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


@pytest.fixture
def tree() -> subprocess.Popen[str]:
    """A process with a child and a grandchild."""
    words = [sys.executable, str(HERE / "children_tree.py"), "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is a part of Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_tree_ends_with_its_root(tree: subprocess.Popen[str], number: signal.Signals) -> None:
    pids = [int(word) for word in tree.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)  # longer than the threads that asked for them lived
    assert all(alive(pid) for pid in pids), "a child ended with a thread of its parent"
    tree.send_signal(number)
    tree.wait(30)
    wait_until_gone(pids)


def test_kill_reaches_what_a_child_started(tmp_path: Path) -> None:
    child = children.start(
        "children_tree",
        "1",
        env=children.environment({"PYTHONPATH": str(HERE)}),
        stdout=subprocess.PIPE,
        text=True,
    )
    grandchild = int(child.stdout.readline())
    children.kill([child])
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    wait_until_gone([grandchild])


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CANARIES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'sang')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    code = "import json, os, subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'])"
    code += "; open('cwd', 'w').write(os.getcwd())"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "work.py").write_text(code)
    # An empty entry is the working directory, also to a Python with a safe path.
    searched = os.pathsep.join(["", "elsewhere", *sys.path[1:]])
    child = children.start("work", env=children.environment({"PYTHONPATH": searched}))
    assert child.wait(60) == 0
    assert not (tmp_path / "sang").exists()
    assert (tmp_path / "cwd").read_text() == str(tmp_path)
    # The canary does sing: without the safe path the same import runs it.
    plain = {k: v for k, v in os.environ.items() if k != children.SAFE_PATH}
    subprocess.run([sys.executable, "-c", "import json"], check=True, env=plain)
    assert (tmp_path / "sang").exists()


def test_keys_stay_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    assert "SHOAL_API_KEY" not in children.environment(without=("SHOAL_API_KEY",))
    assert children.environment({"A": "1"})["A"] == "1"


def test_a_child_inherits_the_cores_of_the_thread_that_asks() -> None:
    before = os.sched_getaffinity(0)
    results: list[set[int]] = []

    def ask() -> None:
        os.sched_setaffinity(0, {min(before)})
        child = children.start(
            "children_tree",
            "0",
            env=children.environment({"PYTHONPATH": str(HERE)}),
            stdout=subprocess.PIPE,
        )
        results.append(os.sched_getaffinity(child.pid))
        children.kill([child])
        child.stdout.close()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert results == [{min(before)}]


def test_an_interrupt_while_a_child_starts_ends_it() -> None:
    begun, made = threading.Event(), []

    def make() -> int:
        begun.wait(30)
        made.append(1)
        return 7

    ended: list[int] = []
    timer = threading.Timer(0.2, lambda: (signal.raise_signal(signal.SIGUSR1), begun.set()))
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            children.from_lasting_thread(make, ended.append)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert ended == [7] == [7 * len(made)]


def test_a_program_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(OSError, match="no-such-program"):
        children.start("x", prefix=["/no-such-program"])
