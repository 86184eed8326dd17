"""Signals: a run saves and stops, and nothing of it is left, however it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.core.scratch import SHARED_MEMORY, left_behind

pytestmark = [
    pytest.mark.multi,
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is a part of Linux"),
]

MARK = "MARK_OF_THIS_TEST"
WAIT_S = 90.0
TRAIN = [
    *("train", "--model", "shoal-0.3m", "--ranks", "2", "--steps", "100000", "--machine", "laptop"),
    *("--set", "seq_len=64", "--set", "global_batch=4", "--set", "checkpoint.every=0"),
    *("--set", "threads=1", "-q"),
]


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment and have not ended."""
    results = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and state != "Z":
            results.append(int(entry.name))
    return results


class Command:
    """A ``shoal`` command with a home, a directory for temporary files and a mark of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *words],
            cwd=folder,
            env={
                **os.environ,
                MARK: self.mark,
                "TMPDIR": str(self.temporary),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal and wait; the status and what it printed."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out + err

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            left = {
                "processes": marked(self.mark),
                "files": sorted(str(p) for p in self.temporary.iterdir()),
                "shared memory": [path.name for path in left_behind([SHARED_MEMORY])],
            }
            if not any(left.values()):
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What ``&`` and ``nohup`` let a process ignore is ignored by its commands too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hangup)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*words: str) -> Command:
        started.append(Command(tmp_path, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        for pid in marked(one.mark):
            os.kill(pid, signal.SIGKILL)


def until_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        assert process.poll() is None, process.communicate()
        events = run / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        if any('"kind":"step"' in x.replace(" ", "") for x in lines) and len(lines) > step:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kinds(run: Path) -> list[str]:
    return [json.loads(x)["kind"] for x in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "launch"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, []),
        (signal.SIGHUP, 129, []),
        (signal.SIGKILL, -9, []),
        (signal.SIGTERM, 143, ["--launch", "ray"]),
    ],
)
def test_training_is_stopped(
    command: Callable[..., Command],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
    launch: list[str],
) -> None:
    if launch:
        pytest.importorskip("ray")
    run = tmp_path / "run"
    one = command(*TRAIN, "--dir", str(run), *launch)
    until_step(run, 5, one.process)
    code, printed = one.end(number)
    assert code == status, printed
    assert "Traceback" not in printed
    one.assert_nothing_left()
    if number != signal.SIGKILL:
        assert "stop" in kinds(run)
        assert "checkpoint" in kinds(run)
        assert "--resume" in printed
    if number in (signal.SIGINT, signal.SIGHUP) or launch:
        return
    # Whatever ended it, another command takes up the run; a killed one has saved nothing yet.
    two = command(*TRAIN[:1], "--dir", str(run), "--resume", "-q")
    time.sleep(0.2)
    until_step(run, len(kinds(run)) + 3, two.process)
    assert two.end(signal.SIGTERM)[0] == 143
    two.assert_nothing_left()


@pytest.mark.slow
def test_a_run_is_ended_while_its_ranks_start(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    draw = random.Random(0)
    for trial in range(6):
        run = tmp_path / f"run-{trial}"
        one = command(*TRAIN, "--dir", str(run))
        while not (run / "ranks").exists():
            assert one.process.poll() is None, one.process.communicate()
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.5))
        number = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)[trial % 3]
        code, printed = one.end(number)
        assert code in (-number, 128 + number), printed
        assert "Traceback" not in printed
        one.assert_nothing_left()


def wait_for_shoal(pid: int) -> None:
    """Until the command begins: before that, Python itself answers Ctrl-C with a trace."""
    deadline = time.monotonic() + WAIT_S
    while "site-packages" not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
def test_ctrl_c_at_the_start_leaves_no_trace(command: Callable[..., Command]) -> None:
    draw = random.Random(0)
    for trial in range(12):
        one = command(*TRAIN, "--set", f"name=run-{trial}")
        # Earlier than that Python itself is starting, which no program can change.
        wait_for_shoal(one.process.pid)
        time.sleep(draw.uniform(0, 0.6))
        code, printed = one.end(signal.SIGINT)
        assert code in (-signal.SIGINT, 130), printed
        assert "Traceback" not in printed
        one.assert_nothing_left()
