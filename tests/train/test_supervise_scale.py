"""How often a supervisor asks about its ranks, counted: not for each rank all the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.parallel.comm.heartbeat import HeartbeatReading
from shoal.train import supervise
from shoal.train.layout import RunDir
from shoal.train.supervise import Supervisor, child_ended
from shoal.train.watch import robust

RANKS = 64


class Process:
    """A rank that runs until it is told to end."""

    def __init__(self) -> None:
        self.asked = 0
        self.returncode: int | None = None
        self.code: int | None = None

    def poll(self) -> int | None:
        self.asked += 1
        self.returncode = self.code
        return self.code


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervise, "time", clock)
    return clock


def supervisor(tmp_path: Path, timeout_s: float) -> tuple[Supervisor, list[Process]]:
    supervisor = Supervisor(RunDir(tmp_path), ranks=RANKS, threads=1, timeout_s=timeout_s)
    processes = [Process() for _ in range(RANKS)]
    supervisor.processes = processes  # type: ignore[assignment]
    return supervisor, processes


def test_a_healthy_run_is_asked_about_now_and_then(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, processes = supervisor(tmp_path, timeout_s=60.0)
    monkeypatch.setattr(supervise, "child_ended", lambda: False)
    looks = [0]

    def read(path: Path, rank: int) -> HeartbeatReading:
        looks[0] += 1
        clock.sleep(0.001)
        return HeartbeatReading(rank, 5, 7, True, 0.2)

    one._reader = SimpleNamespace(read=read, clock=clock.monotonic)  # type: ignore[assignment]
    began = clock.now
    while clock.now < began + 10.0:
        assert not one._poll(began)
        clock.sleep(0.05)
    assert sum(process.asked for process in processes) <= 11 * RANKS  # once a second, not 20 times
    assert looks[0] <= 3 * RANKS  # reading them takes 1 % of the time, however long it takes


def test_the_end_of_a_rank_is_seen_at_once(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, processes = supervisor(tmp_path, timeout_s=60.0)
    ended = [False]
    monkeypatch.setattr(supervise, "child_ended", lambda: ended[0])
    assert not one._poll(clock.now)
    for process in processes:
        process.code = 0
    assert not one._poll(clock.now)  # nobody said that a child has ended
    ended[0] = True
    assert one._poll(clock.now)


def test_a_hang_is_found_when_it_is_one(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = supervisor(tmp_path, timeout_s=5.0)
    monkeypatch.setattr(supervise, "child_ended", lambda: False)
    began = last = clock.now

    def read(path: Path, rank: int) -> HeartbeatReading:
        return HeartbeatReading(rank, 5, 7, True, clock.now - last)

    one._reader = SimpleNamespace(read=read, clock=clock.monotonic)  # type: ignore[assignment]

    class HangError(Exception):
        pass

    def hang(beats: list[HeartbeatReading]) -> None:
        raise HangError

    monkeypatch.setattr(one, "_explain_hang", hang)
    for _ in range(40):  # alive
        last = clock.now
        assert not one._poll(began)
        clock.sleep(0.05)
    silent = clock.now
    with pytest.raises(HangError):
        while clock.now < silent + 60:
            one._poll(began)
            clock.sleep(0.05)
    assert clock.now - last < 5.0 + 0.2


def test_a_child_that_has_ended_is_still_to_be_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        while not child_ended():
            pass
        assert child.wait() != 0  # the end of its input is an error to it


def test_looks_at_records_pause_longer_the_longer_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(robust, "time", clock)
    looked: list[float] = []

    def look(now: float) -> None:
        looked.append(now)
        clock.sleep(0.2)

    rules: Any = SimpleNamespace(_next=0.0, _look=look, _clock=clock.monotonic)
    began = clock.now
    while clock.now < began + 100.0:
        robust._Rules.look(rules)
        clock.sleep(0.05)
    assert len(looked) * 0.2 <= 0.01 * 100.0
