"""The dashboard: a drafter's training, while it runs and when it has ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import client_of, settings, start, step, write_events

from shoal.cost.score import Score, run_id
from shoal.ir import DrafterJob, DrafterReport
from shoal.machine.described import load
from shoal.plan.drafting import plan_drafter
from shoal.train.layout import RunDir

pytestmark = pytest.mark.usefixtures("environment")


def test_a_drafters_run_is_shown(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "heads"
    plan = plan_drafter(DrafterJob(name="heads", model="shoal-27m"), load("1xH100"))
    plan.save(RunDir(root).plan)
    write_events(root, start(), *(step(number) for number in range(8)))
    score = Score()
    score.register(root, "drafter", "heads", "shoal-27m")
    client = client_of(settings(tmp_path))
    for _ in ("while it runs", "when it has ended"):
        for page in ("/", "/runs", f"/runs/{run_id(root)}"):
            answer = client.get(page)
            assert answer.status_code == 200, page
            assert "heads" in answer.text
        shown = client.get(f"/runs/{run_id(root)}").text
        (plan_page,) = set(re.findall(r'href="(/plans/[^"]+)"', shown))
        assert "medusa" in client.get(plan_page).text
        report = DrafterReport(plan=plan, measured={"step_s": 0.5, "drafter_bytes": 1e7})
        score.append(report, root)
    assert "500 ms" in shown
    assert "drafter&#39;s file" in shown
