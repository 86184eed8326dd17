"""Real runs that lose ranks and nodes and go on from memory, bit for bit as if nothing was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.store import Store
from shoal.core.errors import ConfigError, PlanError, RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.chaos import Chaos
from shoal.train.layout import RunDir
from shoal.train.memory import MemoryLevel
from shoal.train.run import execute
from shoal.train.watch.robust import Robust, execute_robust

Make = Callable[..., TrainPlan]

# A killed rank ends some steps after the event that has it killed: the trainers run ahead of the
# supervisor, on a busy machine by several steps, and must not reach the end of the run.
RUN: dict[str, Any] = {"model": "shoal-0.3m", "steps": 40, "parallel": {"dp": 4}}
DISK = {"every": 0, "keep": 2}


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "step"}


def killing(plans: dict[int, Callable[[Any], None]]) -> Callable[[Any, dict[str, Any]], None]:
    """Do each of these things once, when its step was done by the ranks that run then."""
    left = dict(plans)
    begun = False

    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        nonlocal begun
        begun = begun or event["kind"] == "start"
        if event["kind"] == "step" and begun:
            for step in [step for step in left if event["step"] >= step]:
                left.pop(step)(supervisor)
                begun = False
                break

    return inject


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_rank_and_a_killed_node_lose_at_most_one_step(
    make_plan: Make, tmp_path: Path
) -> None:
    straight = tmp_path / "straight"
    execute(make_plan(**RUN, checkpoint=DISK), straight)
    # The ranks of a node of two are lost together, and each group has one of them.
    plan = make_plan(**RUN, checkpoint={**DISK, "memory": {"name": "xor", "ranks_per_node": 2}})
    run = tmp_path / "run"
    seen: list[dict[str, Any]] = []
    levels: list[Any] = []

    def rank(supervisor: Any) -> None:
        levels.append(supervisor.level)
        os.kill(supervisor.processes[1].pid, signal.SIGKILL)

    execute(
        plan,
        run,
        restarts=2,
        watch=seen.append,
        inject=killing({4: rank, 9: lambda supervisor: supervisor.lose((2, 3))}),
    )
    assert losses(run) == losses(straight)
    events = list(read_events(run / "events.jsonl"))
    results = [e for e in events if e["kind"] == "recover"]
    assert [e["rung"] for e in results] == ["trainers", "rebuilt"]
    assert results[1]["rebuilt"] == [2, 3]
    starts = [e for e in events if e["kind"] == "start"]
    assert [e["level"] for e in starts[1:]] == ["memory", "memory"]
    # Steps are counted from one behind: the last finished before each start against its first.
    for start in starts[1:]:
        before = events[: events.index(start)]
        done = max(e["step"] for e in before if e["kind"] == "step") + 1
        assert 0 <= done - start["step"] <= 1
    # Nothing stays behind.
    assert all(process.poll() is not None for process in levels[0].processes)
    assert not (run / "ranks" / "memory.json").exists()


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("method", ["adalora", "diff_pruning"])
def test_what_a_fine_tuning_method_keeps_beside_parameters_comes_back(
    make_plan: Make, tmp_path: Path, method: str
) -> None:
    job = {**RUN, "seq_len": 32, "parallel": {"dp": 2}, "finetune": method}
    execute(make_plan(**job, checkpoint=DISK), tmp_path / "straight")
    execute(
        make_plan(**job, checkpoint={**DISK, "memory": "copies"}),
        tmp_path / "run",
        restarts=1,
        inject=killing({5: lambda supervisor: supervisor.processes[1].kill()}),
    )
    levels = [
        e["level"] for e in read_events(tmp_path / "run/events.jsonl") if e["kind"] == "start"
    ]
    assert levels == ["disk", "memory"]
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_bad_starts(make_plan: Make, tmp_path: Path) -> None:
    def start(parallel: dict[str, int], memory: Any, **more: Any) -> None:
        checkpoint = {**DISK, "memory": memory}
        execute(make_plan(parallel=parallel, checkpoint=checkpoint, **more), tmp_path / "run")

    with pytest.raises(ConfigError, match="members of a group = 1: expected 2 to 255"):
        start({"dp": 1}, "xor")
    with pytest.raises(ConfigError, match="members of a group = 1"):
        start({"dp": 2}, {"name": "xor", "ranks_per_node": 2})
    with pytest.raises(ConfigError, match=r"rs\.losses = 2: expected fewer than the 2 members"):
        start({"dp": 2}, "rs")
    with pytest.raises(ConfigError, match="cannot be put in groups of 3"):
        start({"dp": 4}, {"name": "xor", "group": 3})
    with pytest.raises(ConfigError, match=r"replan\.enabled = True"):
        start({"dp": 2}, "xor", replan={"enabled": True})
    with pytest.raises(PlanError, match="finetune mezo, whose weights move while passes are made"):
        start({"dp": 2}, "xor", finetune="mezo")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.multi
def test_a_run_that_cannot_go_on_leaves_its_memory_on_the_disk(
    make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(
        model="shoal-0.3m",
        steps=40,
        parallel={"dp": 2},
        checkpoint={**DISK, "memory": "copies"},
        watch={"beat_s": 0.5},
    )
    run = tmp_path / "run"
    with pytest.raises(RankError, match=r"no spare is left.*the state of step \d+ is saved"):
        execute_robust(
            plan,
            run,
            Robust(spares=1, min_ranks=0, hang_s=20),
            inject=killing(
                {step: lambda supervisor: supervisor.processes[1].kill() for step in (5, 12)}
            ),
        )
    events = list(read_events(run / "events.jsonl"))
    # The spare took over from memory; there was no checkpoint then.
    assert [e["level"] for e in events if e["kind"] == "start"] == ["disk", "memory"]
    done = max(e["step"] for e in events if e["kind"] == "step") + 1
    (saved,) = Store(run / "checkpoints").steps()
    assert done - 1 <= saved <= done
    assert Store(run / "checkpoints").open(saved).meta["step"] == saved


def test_too_few_replicas_go_on_without(make_plan: Make, tmp_path: Path) -> None:
    job = make_plan(parallel={"dp": 2}, checkpoint={**DISK, "memory": "xor"}).job
    notes: list[dict[str, Any]] = []
    with MemoryLevel(job, RunDir(tmp_path), notes.append) as level:
        assert level.fleet is not None
        assert len(level.fleet.processes) == 2
        one = job.model_copy(update={"parallel": job.parallel.model_copy(update={"dp": 1})})
        changed = level.change(one)
        assert changed.checkpoint.memory is None
        assert level.fleet is None
    assert [event["kind"] for event in notes] == ["memory_off"]
    assert "members of a group = 1" in notes[0]["message"]


def test_chaos() -> None:
    class Supervised:
        ranks = 4

        def __init__(self) -> None:
            self.lost: list[tuple[int, ...]] = []

        def lose(self, ranks: tuple[int, ...]) -> None:
            self.lost.append(ranks)

    supervisor: Any = Supervised()
    chaos = Chaos("kill-node:5:2", ranks_per_node=2, seed=3)
    for step in range(30):
        chaos(supervisor, {"kind": "step", "step": step})
        chaos(supervisor, {"kind": "checkpoint", "step": step})
    assert [step for step, _ in chaos.killed] == [4, 9]
    assert supervisor.lost == [ranks for _, ranks in chaos.killed]
    assert set(supervisor.lost) <= {(0, 1), (2, 3)}
    for wrong in ("kill-node", "kill-node:0", "kill-rack:3", "kill-rank:x", "kill-rank:3:y"):
        with pytest.raises(ConfigError, match=f"--chaos = '{wrong}': expected KIND:STEPS"):
            Chaos(wrong)
