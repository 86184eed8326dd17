"""Runs whose checkpoints go to farther places: what fails there, and going on from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3_server import Refusing, bucket

from shoal.checkpoint.store import Store
from shoal.core.errors import ConfigError
from shoal.core.meter import read_events
from shoal.ir import Machine, TrainPlan
from shoal.train.run import execute
from shoal_command import shoal

pytestmark = [pytest.mark.multi, pytest.mark.slow]

Make = Callable[..., TrainPlan]


def told(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in told(run, "step")}


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def test_goes_on_from_the_nearest_that_is_whole(make_plan: Make, tmp_path: Path) -> None:
    far, run = tmp_path / "far", tmp_path / "run"

    def plan(steps: int) -> TrainPlan:
        saves = {"every": 6, "keep": 1, "mode": "lazy", "levels": [{"path": str(far), "keep": 9}]}
        return make_plan(steps=steps, checkpoint=saves)

    def goes_on(name: str, spoil: Callable[[Path], Any]) -> Path:
        """A run like the first whose own disk was spoilt goes on."""
        other = tmp_path / name
        shutil.copytree(run, other)
        spoil(other / "checkpoints")
        execute(plan(14), other, resume=True)
        shutil.rmtree(far / "step-00000014")
        assert told(other, "start")[-1]["step"] == 12
        return other

    execute(plan(12), run)
    assert Store(run / "checkpoints").steps() == (12,) and Store(far).steps() == (6, 12)
    assert [one["state"] for one in told(run, "checkpoint_level")] == ["complete"] * 2

    lost = goes_on("lost", shutil.rmtree)
    assert told(lost, "start")[-1]["level"] == str(far)
    name = "step-00000012/rank-00000.safetensors"
    damaged = goes_on("damaged", lambda store: flip(store / name))
    assert told(damaged, "start")[-1]["level"] == str(far)
    (passed,) = [e for e in told(damaged, "checkpoint_level") if e["state"] == "passed_over"]
    assert passed["step"] == 12 and name in passed["message"]
    whole = goes_on("whole", lambda store: None)
    assert told(whole, "start")[-1]["level"] == "disk"
    assert losses(whole) == losses(lost) == losses(damaged)


def test_a_far_place_that_fails_leaves_the_run_and_the_near_one(
    make_plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket(monkeypatch, wrap=Refusing) as place:
        run = tmp_path / "run"
        level = {"path": place, "tries": 1, "keep": 9}
        saves = {"every": 20, "keep": 9, "mode": "snapshot", "levels": [level]}
        execute(make_plan(steps=60, checkpoint=saves), run)
        assert Store(run / "checkpoints").steps() == (20, 40, 60)
        assert Store(place).steps() == (20, 60)
        states = {one["step"]: one for one in told(run, "checkpoint_level")}
        assert {step: one["state"] for step, one in states.items()} == {
            20: "complete",
            40: "failed",
            60: "complete",
        }
        assert "step 40 cannot be saved" in states[40]["message"]
        assert not told(run, "checkpoint_failed") and told(run, "end")


def test_begins_from_an_address(
    make_plan: Make,
    tmp_path: Path,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.save(tmp_path / "machine.yaml")
    with bucket(monkeypatch) as place:
        first, second = tmp_path / "first", tmp_path / "second"
        saved = make_plan(checkpoint={"every": 12, "keep": 9, "path": place})
        execute(saved, first)
        with pytest.raises(ConfigError, match="holds checkpoints of another run, the newest of"):
            execute(saved, tmp_path / "other")
        # Another run begins where a named one was saved, and does the same from there on.
        done = shoal(
            *("train", "--from", f"{place}/step-00000012", "--dir", second),
            *("--machine", tmp_path / "machine.yaml", "--quiet"),
        )
        assert done.returncode == 0, done.stderr
        assert told(second, "start")[0]["step"] == 12
        assert losses(second) == {step: losses(first)[step] for step in range(12, 24)}
        # It has saved to its own directory, and the other one's are as they were.
        assert Store(second / "checkpoints").steps() == (24,)
        assert Store(place).steps() == (12, 24)
