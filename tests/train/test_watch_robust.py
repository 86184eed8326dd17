"""Runs that find their own faults: who failed is named, and the run goes on as if nothing was."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.run import execute
from shoal.train.watch.diagnose import diagnose, perfetto
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.robust import Robust, execute_robust

Make = Callable[..., TrainPlan]

RUN: dict[str, Any] = {
    "model": "shoal-0.3m",
    "steps": 16,
    "checkpoint": {"every": 4, "keep": 4},
    "watch": {"beat_s": 0.5, "check_every": 4},
}


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


def at(step: int, act: Callable[[Any], None]) -> Callable[[Any, dict[str, Any]], None]:
    """Do something to the supervisor's processes once, when a step was done."""
    done: list[int] = []

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if not done and event["kind"] == "step" and event["step"] >= step:
            done.append(step)
            act(supervisor)

    return inject


def send(rank: int, number: int) -> Callable[[Any], None]:
    return lambda supervisor: os.kill(supervisor.processes[rank].pid, number)


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_rank_is_replaced_and_nothing_else_changes(
    make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(parallel={"dp": 2}, **RUN)
    execute(plan, tmp_path / "straight")
    run = tmp_path / "run"
    seen: list[dict[str, Any]] = []
    report = execute_robust(
        plan,
        run,
        Robust(spares=1, hang_s=20),
        watch=seen.append,
        inject=at(6, send(1, signal.SIGKILL)),
    )
    assert report.measured["finished"] == 1
    assert losses(run) == losses(tmp_path / "straight")
    (fault,) = [e for e in read_events(run / "events.jsonl") if e["kind"] == "fault"]
    assert (fault["rule"], fault["rank"], fault["place"]) == ("lost", 1, 1)
    (again,) = [e for e in seen if e["kind"] == "restart"]
    assert again["places"] == [0, 2]
    # What the last start recorded can be shown, and the evidence of the fault is kept.
    result = diagnose(run / "ranks")
    assert "2 of 2 ranks" in result["text"]
    trace = json.loads((run / "ranks" / "trace.json").read_text())["traceEvents"]
    assert {"all_reduce loss", "load", "update"} <= {event["name"] for event in trace}
    assert "rank 1" in (run / "ranks" / "heat.html").read_text()
    assert list((run / "faults" / "1").glob("rank-*.flight"))


@pytest.mark.slow
@pytest.mark.multi
def test_a_stopped_rank_misses_its_beats_and_the_run_shrinks(
    make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(parallel={"dp": 2}, **RUN)
    run = tmp_path / "run"
    report = execute_robust(plan, run, Robust(hang_s=30), inject=at(5, send(0, signal.SIGSTOP)))
    assert report.measured["finished"] == 1
    (fault,) = [e for e in read_events(run / "events.jsonl") if e["kind"] == "fault"]
    assert (fault["rule"], fault["rank"]) == ("beat", 0)
    starts = [e["ranks"] for e in read_events(run / "events.jsonl") if e["kind"] == "start"]
    assert starts == [2, 1]


@pytest.mark.slow
@pytest.mark.multi
def test_without_a_spare_it_stops_with_its_state_saved(make_plan: Make, tmp_path: Path) -> None:
    plan = make_plan(parallel={"dp": 2}, **RUN)
    # Which step is the last saved depends on when the signal arrives.
    lost = r"no spare is left for place 1.*the state of step (4|8) is saved"
    with pytest.raises(RankError, match=lost) as caught:
        execute_robust(
            plan,
            tmp_path / "run",
            Robust(min_ranks=0),
            inject=at(6, send(1, signal.SIGKILL)),
        )
    assert "--resume --robust" in str(caught.value)


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_and_a_hanging_rank_are_both_named_and_replaced(
    make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(parallel={"dp": 2}, **{**RUN, "steps": 10})

    def both(supervisor: Any) -> None:
        send(1, signal.SIGSTOP)(supervisor)
        send(0, signal.SIGKILL)(supervisor)

    run = tmp_path / "run"
    report = execute_robust(plan, run, Robust(spares=2, hang_s=20), inject=at(6, both))
    assert report.measured["finished"] == 1
    (fault,) = [e for e in read_events(run / "events.jsonl") if e["kind"] == "fault"]
    (more,) = fault["more"]
    assert (fault["rule"], fault["place"]) == ("lost", 0)
    assert (more["rule"], more["rank"], more["place"]) == ("hang", 1, 1)
    (again,) = [e for e in read_events(run / "events.jsonl") if e["kind"] == "restart"]
    assert again["places"] == [2, 3], "neither place is used again"
    phases = {e["name"] for e in perfetto(Evidence.load(run / "ranks"))["traceEvents"]}
    assert {"forward", "backward", "load", "update"} <= phases


def test_wrong_options(make_plan: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--spares = -1"):
        execute_robust(make_plan(), tmp_path, Robust(spares=-1))
    with pytest.raises(ConfigError, match=r"watch\.record = False"):
        execute_robust(make_plan(watch={"record": False}), tmp_path, Robust())
