"""Training jobs with ``offload`` as ``shoal train`` runs them: real ranks, real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shoal.core.meter import read_events
from shoal.ir import Plan
from shoal.train.run import execute

RUN: dict[str, Any] = {
    "model": "shoal-0.3m",
    "steps": 4,
    "seq_len": 32,
    "parallel": {"dp": 2},
    "checkpoint": {"every": 0},
}


def steps(plan: Plan, place: Path) -> list[dict[str, Any]]:
    execute(plan, place)
    return [e for e in read_events(place / "events.jsonl") if e["kind"] == "step"]


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks_share_what_lies_in_tiers(make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    whole = steps(make_plan(**RUN), tmp_path / "whole")
    for name in ("zero_infinity", "superpipeline"):
        offload = {"name": name, "device_budget": "64MiB"}
        found = steps(make_plan(**RUN, offload=offload), tmp_path / name)
        assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in whole], rel=1e-6)
        assert 0 < max(e["tier_bytes"]["device"] for e in found) <= 64 * 2**20
