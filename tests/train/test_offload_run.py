"""Training jobs with ``offload`` as ``shoal train`` runs them: real ranks, real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shoal.core.meter import read_events
from shoal.cost.score import Score
from shoal.ir import TrainPlan, compared
from shoal.plan.strategy import PLANNERS
from shoal.train.run import execute

RUN: dict[str, Any] = {
    "model": "shoal-0.3m",
    "steps": 4,
    "seq_len": 32,
    "parallel": {"dp": 2},
    "checkpoint": {"every": 0},
}


def steps(plan: TrainPlan, place: Path) -> list[dict[str, Any]]:
    execute(plan, place)
    return [e for e in read_events(place / "events.jsonl") if e["kind"] == "step"]


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_share_what_lies_in_tiers(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    whole = steps(make_plan(**RUN), tmp_path / "whole")
    for name in ("zero_infinity", "superpipeline"):
        offload = {"name": name, "device_budget": "64MiB"}
        result = steps(make_plan(**RUN, offload=offload), tmp_path / name)
        assert [e["loss"] for e in result] == pytest.approx([e["loss"] for e in whole], rel=1e-6)
        assert 0 < max(e["tier_bytes"]["device"] for e in result) <= 64 * 2**20


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zero_infinity", "superpipeline", "deep_optimizer_states", "fuyou"]
)
def test_what_the_search_chose_is_trained_and_scored(
    name: str, make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    base = make_plan(**{**RUN, "parallel": {"dp": 1}, "grad_clip": 0})
    planner = PLANNERS.build({"name": "search", "offload": [name]})
    plan = planner.plan(base.job, base.machine)[0]
    assert plan.job.offload is not None
    assert plan.job.offload.name == name
    report = execute(plan, tmp_path / name)
    score = Score(tmp_path / "score.db")
    score.append(report)
    rows = {row.quantity: row for row in score.rows()}
    assert rows["step_s"].predicted
    tiers = [key for key in ("device_bytes", "host_bytes", "disk_bytes") if key in rows]
    assert {"device_bytes", "host_bytes"} <= set(tiers)
    for key in tiers:
        predicted = rows[key].predicted
        assert predicted is not None
        assert 0 < rows[key].measured <= predicted, key
    chosen = [e for e in read_events(tmp_path / name / "events.jsonl") if e["kind"] == "swap"]
    assert len(chosen) == (name == "fuyou")
    for event in chosen:
        assert event["step"] == 1
        assert all(rate > 0 for rate in event["bytes_per_s"].values())
        assert event["predicted_s"] <= min(seconds for _, seconds in event["curve"]) + 1e-9
    notes = [label.strip() for label, *_ in compared(report)]
    assert "most on the device" in notes
