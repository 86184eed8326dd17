"""The dashboard: the tables and pictures of a run of any kind, when it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import client_of, settings, start, write_events

from shoal.core.files import write_json
from shoal.cost.score import Score, run_id
from shoal.fields.data.curate.job import CurateJob, CuratePlan, CurateReport
from shoal.machine.described import load
from shoal.train.layout import RunDir

pytestmark = pytest.mark.usefixtures("environment")

STAGE = {
    "name": "length",
    "rows": 1000,
    "dropped": 250,
    "seconds": 0.5,
    "counts": {"<b>few</b>": 250},
}


def test_tables_and_pictures_are_shown(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "curate"
    plan = CuratePlan(
        job=CurateJob(data="crawl", method="random"),  # type: ignore[arg-type]
        machine=load("laptop"),
        predicted={},
        num_bytes=1,
    )
    plan.save(RunDir(root).plan)
    write_events(root, start())
    score = Score()
    score.register(root, "curate", "curate")
    client = client_of(settings(tmp_path))
    page = f"/runs/{run_id(root)}"
    assert "What was dropped" not in client.get(page).text
    for details in ({"stages": [STAGE]}, {"stages": [{}]}):
        report = CurateReport(plan=plan, measured={"total_s": 1.0}, details=details)
        write_json(RunDir(root).report, report.model_dump(mode="json"))
        (root / "stages.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        write_events(root, start(), {"kind": "end", "step": 1})
        client = client_of(settings(tmp_path))
        shown = client.get(page).text
        whole = details["stages"][0] == STAGE
        assert ("What was dropped" in shown) is whole  # a damaged report costs its table alone
        assert ("25.0 %" in shown) is whole
        assert "<b>few</b>" not in shown
        assert f'src="{page}/stages.svg"' in shown
    picture = client.get(f"{page}/stages.svg")
    assert picture.headers["content-type"] == "image/svg+xml"
    assert "sandbox" in picture.headers["content-security-policy"]
    assert client.get(f"{page}/other.svg").status_code == 404
