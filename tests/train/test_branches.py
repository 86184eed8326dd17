"""A run goes on from an earlier step in a branch of its own, and never from what is not finite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.branches import CheckpointBranch, begin_branch, branches, place_of
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, NonFiniteError, RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.finite import non_finite
from shoal.train.run import execute

Make = Callable[..., TrainPlan]


def saved(place: Path, *steps: int) -> None:
    for step in steps:
        Store(place, keep=9).save(step, {"model.a": torch.full((3,), float(step))}, {})


def test_branches_are_listed_and_keep_apart(tmp_path: Path) -> None:
    store = tmp_path / "checkpoints"
    assert branches(tmp_path) == [CheckpointBranch(0)]
    saved(store, 10, 20, 40)
    assert begin_branch(tmp_path, [store], 20) == CheckpointBranch(1, 0, 20)
    assert place_of(store, 1) == store / "branch-1"
    saved(store / "branch-1", 30, 40)
    # The newest branch that has the step is meant.
    assert begin_branch(tmp_path, [store], 40) == CheckpointBranch(2, 1, 40)
    assert begin_branch(tmp_path, [store], 10) == CheckpointBranch(3, 0, 10)
    assert [one.number for one in branches(tmp_path)] == [0, 1, 2, 3]
    assert Store(store).steps() == (10, 20, 40), "a branch is no step"
    assert place_of("s3://bucket/run/", 2) == "s3://bucket/run/branch-2"


def test_a_step_that_no_branch_has_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "checkpoints"
    saved(store, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 11; there are: 10"):
        begin_branch(tmp_path, [store], 11)
    assert branches(tmp_path) == [CheckpointBranch(0)]


def test_what_is_not_finite_is_named() -> None:
    good, bad = torch.ones(4), torch.tensor([1.0, float("inf")])
    whole = Piece.whole
    assert non_finite({"a": [whole(good)], "n": [whole(torch.tensor([1, 2]))]}) == ""
    assert non_finite({"none": [whole(torch.empty(0))]}) == ""
    eight = torch.tensor([float("nan")]).to(torch.float8_e4m3fn)
    result = non_finite({"a": [whole(good), whole(bad)], "b": [whole(eight)], "c": [whole(good)]})
    assert result == "2 of 3 tensors have values that are NaN or infinite: a, b"


def starts(run: Path) -> list[int]:
    return [e["step"] for e in read_events(run / "events.jsonl") if e["kind"] == "start"]


def kill_at(step: int) -> Callable[..., None]:
    def inject(supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == step:
            os.kill(supervisor.processes[0].pid, signal.SIGKILL)

    return inject


@pytest.mark.slow
@pytest.mark.multi
def test_resume_follows_the_branch_that_ran_last(make_plan: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = make_plan(steps=10, checkpoint={"every": 2, "keep": 3})
    execute(plan, run)
    store = run / "checkpoints"
    assert Store(store).steps() == (6, 8, 10)
    before = {path: path.stat().st_ino for path in store.glob("step-*")}
    with pytest.raises(RankError, match="continues from step 6; continue with --resume"):
        execute(plan, run, from_step=6, inject=kill_at(6))
    with pytest.raises(RankError, match="last checkpoint: step 8"):
        execute(plan, run, resume=True, inject=kill_at(8))
    report = execute(plan, run, resume=True)
    assert report.measured["finished"] == 1
    assert starts(run) == [0, 6, 6, 8]
    assert Store(store / "branch-1").steps() == (8, 10)
    assert {path: path.stat().st_ino for path in store.glob("step-*")} == before


@pytest.mark.slow
@pytest.mark.multi
def test_an_earlier_step_beside_a_damaged_one_ends_with_an_export(
    make_plan: Make, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    plan = make_plan(steps=6, checkpoint={"every": 2, "keep": 3})
    execute(plan, run)
    newest = run / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    execute(plan, run, from_step=4)
    assert starts(run) == [0, 4]
    assert (run / "export" / "model.safetensors").exists()
    assert bytes(data) == newest.read_bytes(), "the other branch is as it was"


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("shard", ["replicated", "zero2"])
def test_weights_that_overflow_are_not_saved(shard: str, make_plan: Make, tmp_path: Path) -> None:
    # The first update makes weights infinite; its loss and gradients are finite.
    optimizer = {"name": "adamw", "lr": 1e45}
    run = tmp_path / "run"
    plan = make_plan(
        optimizer=optimizer,
        steps=4,
        shard=shard,
        parallel={"dp": 2},
        checkpoint={"every": 1},
    )
    with pytest.raises(NonFiniteError, match=r"step 1 is not saved: \d+ of \d+ tensors .* rank"):
        execute(plan, run)
    assert Store(run / "checkpoints").steps() == ()


@pytest.mark.slow
@pytest.mark.multi
def test_a_checkpoint_that_is_not_finite_is_not_continued(make_plan: Make, tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = make_plan(steps=4, checkpoint={"every": 2})
    execute(plan, run)
    store = Store(run / "checkpoints")
    last = store.open(4)
    tensors = {name: last.tensor(name) for name in last.names()}
    name = next(name for name in tensors if name.startswith("model."))
    tensors[name].view(-1)[0] = float("nan")
    store.save(4, tensors, last.meta)
    with pytest.raises(CheckpointError, match=rf"step 4 cannot be continued: 1 of .* {name}"):
        execute(make_plan(steps=6, checkpoint={"every": 2}), run, resume=True)
    with pytest.raises(CheckpointError, match=rf"step 4 cannot be continued: 1 of .* {name}"):
        execute(make_plan(steps=6), tmp_path / "other", start=str(run / "checkpoints"))
    execute(make_plan(steps=6, checkpoint={"every": 2}), run, from_step=2)
    assert starts(run)[-1] == 2
