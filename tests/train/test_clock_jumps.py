"""The wall clock is set while a run goes on: nothing that Shoal decides depends on it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.interval import failures_seen
from shoal.core.errors import RankError
from shoal.core.meter import SINKS, Meter, read_events
from shoal.ir import TrainPlan
from shoal.parallel.comm.heartbeat import BeatReader, Heartbeat, RunningClock
from shoal.train.run import execute

Make = Callable[..., TrainPlan]
HOUR_S = 3600.0


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Set the wall clock of this process forward or back by so many seconds."""
    offset, seconds, nanoseconds = [0.0], time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + offset[0])
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(offset[0] * 1e9))

    def set_by(by: float) -> None:
        offset[0] += by

    yield set_by


@pytest.mark.parametrize("by", [HOUR_S, -HOUR_S])
def test_the_age_of_a_heartbeat_does_not_follow_the_wall_clock(
    by: float, tmp_path: Path, jump: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.beat"
    Heartbeat(path, 0).step(3)
    jump(by)
    beat = Heartbeat.read(path, 0)
    assert beat is not None and beat.age_s < 60, "the rank has just written"
    now = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now + 900 * 10**9)
    beat = Heartbeat.read(path, 0)
    assert beat is not None and 899 < beat.age_s < 960, "a rank that is silent for 15 minutes"


def test_a_heartbeat_of_an_earlier_boot_has_the_age_of_the_wall_clock(
    tmp_path: Path, jump: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.beat"
    Heartbeat(path, 0).step(3)
    monkeypatch.setattr("shoal.parallel.comm.heartbeat._boot", lambda: b"another!")
    jump(HOUR_S)
    beat = Heartbeat.read(path, 0)
    assert beat is not None and 3599 < beat.age_s < 3660


def test_a_watcher_measures_since_the_content_changed(tmp_path: Path) -> None:
    now = [100.0]
    reader = BeatReader(lambda: now[0])
    path = tmp_path / "rank-2.beat"
    assert reader.read(path, 2) is None
    heart = Heartbeat(path, 2)
    ages = []
    for write in (False, False, True, False):
        now[0] += 7.0
        if write:
            heart.alive()
        beat = reader.read(path, 2)
        assert beat is not None
        ages.append(beat.age_s)
    assert ages == [0.0, 7.0, 0.0, 7.0]


def test_a_pause_of_the_reader_is_not_held_against_the_ranks() -> None:
    now = [50.0]
    clock = RunningClock(longest_s=5.0, clock=lambda: now[0])
    for step in (1.0, 0.5, HOUR_S):  # the container was frozen for an hour
        now[0] += step
        seen = clock()
    assert seen == pytest.approx(6.5)


def test_the_time_in_which_failures_were_seen_does_not_follow_the_wall_clock(
    tmp_path: Path, jump: Callable[[float], None]
) -> None:
    path = tmp_path / "events.jsonl"
    with Meter([SINKS.build({"name": "jsonl", "path": str(path)})]) as meter:
        meter.event("start")
        jump(HOUR_S)
        meter.event("step")
    failures, seconds = failures_seen(read_events(path))
    assert failures == 0 and seconds < 60


@pytest.mark.slow
@pytest.mark.multi
def test_an_hour_forward_ends_no_healthy_run(
    make_plan: Make, tmp_path: Path, jump: Callable[[float], None]
) -> None:
    plan = make_plan(model="shoal-0.3m", steps=12, parallel={"dp": 2}, checkpoint={"every": 6})

    def inject(_supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            jump(HOUR_S)

    assert execute(plan, tmp_path / "run", inject=inject).measured["finished"] == 1


@pytest.mark.slow
@pytest.mark.multi
def test_an_hour_back_hides_no_hang(
    make_plan: Make, tmp_path: Path, jump: Callable[[float], None]
) -> None:
    plan = make_plan(
        model="shoal-0.3m", steps=400, parallel={"dp": 2}, checkpoint={"every": 0}, timeout_s=8
    )

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 2:
            jump(-HOUR_S)
            os.kill(supervisor.processes[1].pid, signal.SIGSTOP)

    with pytest.raises(RankError, match=r"rank 1 of 2 .* hangs in step \d+") as caught:
        execute(plan, tmp_path / "run", inject=inject)
    assert "does not answer" in str(caught.value)
