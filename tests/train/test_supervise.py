"""Faults of several ranks at once: each is named, and ranks that only wait are not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import RankError
from shoal.ir import TrainPlan
from shoal.train.layout import RunDir
from shoal.train.supervise import Failure, Supervisor
from shoal.train.watch.recorder import Recorder

Make = Callable[..., TrainPlan]
pytestmark = [pytest.mark.slow, pytest.mark.multi]

# What a rank does in step 3, after 12 collectives, with its heartbeat in hand.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from shoal.parallel.comm.heartbeat import Heartbeat
heart = Heartbeat(Path(sys.argv[1]), int(sys.argv[2]))
for _ in range(12):
    heart.enter(); heart.leave()
heart.step(3)
Path(sys.argv[1] + ".ready").touch()
while not Path(sys.argv[3]).exists():
    heart.step(3)
    time.sleep(0.01)
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "heart.enter('all_reduce'); time.sleep(600)"
COMPUTES = "time.sleep(1.5); " + WAITS
HANGS = "time.sleep(600)"
STOPS = "heart.enter('all_reduce'); os.kill(os.getpid(), signal.SIGSTOP)"
ABORTS = "os.abort()"


def failures(make_plan: Make, root: Path, *acts: str, hang_s: float = 2.0) -> tuple[Failure, ...]:
    """What a supervisor names when the ranks do these things at one moment."""
    directory = RunDir(root)
    make_plan().save(directory.plan)
    directory.ranks.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(directory, ranks=len(acts), threads=1, timeout_s=hang_s)
    go = root / "go"
    for rank, act in enumerate(acts):
        argv = [str(directory.beat(rank)), str(rank), str(go)]
        supervisor.processes.append(
            subprocess.Popen([sys.executable, "-c", SCRIPT + act, *argv], cwd=root)
        )

    def tick() -> None:
        if all(Path(f"{directory.beat(rank)}.ready").exists() for rank in range(len(acts))):
            go.touch()

    with pytest.raises(RankError) as caught:
        supervisor.wait(tick)
    for failure in supervisor.failures:
        assert failure.text in str(caught.value)
    return supervisor.failures


def named(found: tuple[Failure, ...]) -> list[tuple[int, str]]:
    return [(one.rank, one.rule) for one in found]


def test_a_killed_rank_and_a_hanging_one_are_both_named(make_plan: Make, tmp_path: Path) -> None:
    result = failures(make_plan, tmp_path, WAITS, DIES, HANGS, WAITS)
    assert named(result) == [(1, "lost"), (2, "hang")]
    assert "killed by SIGKILL in step 3" in result[0].text
    assert "hangs in step 3, before collective 13" in result[1].text


def test_a_stopped_rank_beside_a_killed_one_is_named_at_once(
    make_plan: Make, tmp_path: Path
) -> None:
    began = time.monotonic()
    result = failures(make_plan, tmp_path, STOPS, WAITS, DIES, hang_s=300.0)
    assert named(result) == [(2, "lost"), (0, "hang")]
    assert time.monotonic() - began < 100, "nobody waits for a stopped rank"


def test_ranks_that_compute_or_wait_are_not_named_beside_a_killed_one(
    make_plan: Make, tmp_path: Path
) -> None:
    result = failures(make_plan, tmp_path, WAITS, COMPUTES, DIES, hang_s=60.0)
    assert named(result) == [(2, "lost")]


def test_two_killed_ranks_and_one_that_aborts_for_their_sake(
    make_plan: Make, tmp_path: Path
) -> None:
    result = failures(make_plan, tmp_path, ABORTS, DIES, DIES, WAITS)
    assert named(result) == [(1, "lost"), (2, "lost")]


def test_two_hanging_ranks_are_both_named(make_plan: Make, tmp_path: Path) -> None:
    result = failures(make_plan, tmp_path, WAITS, HANGS, STOPS)
    assert named(result) == [(1, "hang"), (2, "hang")]


def test_the_phase_of_a_hang_is_named(make_plan: Make, tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    directory.ranks.mkdir()
    recorder = Recorder(directory.flight(1), 1, 2)
    with recorder.span("forward"):
        pass
    with recorder.span("backward"):
        result = failures(make_plan, tmp_path, WAITS, HANGS)
    assert "hangs in step 3 in backward, before collective 13" in result[0].text
