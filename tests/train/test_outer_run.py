"""Real runs of workers that agree once a round: saved at a round's start, resumed bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, RankError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.planning import with_rounds
from shoal.train.run import execute

pytestmark = [pytest.mark.multi, pytest.mark.slow]

from test_run import kill_at, losses  # noqa: E402

Make = Callable[..., TrainPlan]


def rounds(run: Path) -> dict[int, float]:
    """Step at which a round's news came -> mean loss of all workers."""
    return {e["step"]: e["loss"] for e in read_events(run / "events.jsonl") if e["kind"] == "round"}


@pytest.mark.parametrize(
    ("sync", "extra"),
    [
        ({"name": "co2", "tau": 4}, {"checkpoint": {"every": 6, "keep": 4, "mode": "lazy"}}),
        ({"name": "co2", "tau": 4, "sharded": True}, {}),
        ({"name": "diloco", "tau": 4}, {}),
    ],
    ids=["co2", "sharded", "diloco"],
)
def test_a_killed_rank_is_named_and_the_resumed_run_is_bit_equal(
    sync: dict[str, Any], extra: dict[str, Any], make_plan: Make, tmp_path: Path
) -> None:
    plan = make_plan(parallel={"dp": 2}, sync=sync, **extra)
    report = execute(plan, tmp_path / "straight")
    run = tmp_path / "run"
    with pytest.raises(RankError, match=r"rank 1 of 2 .* was killed by SIGKILL"):
        execute(plan, run, inject=kill_at(14))
    whole = Store(run / "checkpoints").steps()
    execute(plan, run, resume=True)
    assert losses(run) == losses(tmp_path / "straight")
    assert rounds(run) == rounds(tmp_path / "straight")
    assert losses(run)[23] < losses(run)[0], "it learns"
    events = list(read_events(run / "events.jsonl"))
    saved = [e["step"] for e in events if e["kind"] == "checkpoint"]
    assert set(saved) <= {8, 12, 16, 20, 24}, "checkpoints fall on rounds"
    # What is saved behind training may not be whole when a rank is killed.
    assert set(whole) <= {8, 12} and (whole or plan.job.checkpoint.mode.name == "lazy")
    assert [e["step"] for e in events if e["kind"] == "start" and e["resumed"]] == [*whole[-1:]]
    assert 0 <= report.measured["outer_exposed"] < 1
    for change in (
        {"sync": "every_step"},
        {"sync": {**sync, "tau": 2}},
    ):
        with pytest.raises(CheckpointError, match=r"saved with sync = .*restore that value"):
            execute(make_plan(parallel={"dp": 2}, **{**extra, **change}), run, resume=True)


def test_the_plan_chooses_the_steps_of_a_round(make_plan: Make) -> None:
    plan = with_rounds(make_plan(parallel={"dp": 2}, sync="co2"))
    assert 1 <= plan.job.sync.options["tau"] <= 48
    assert with_rounds(plan) == plan
