"""The dashboard: what a kind of job makes of the events of a run, while it runs and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dash_home import client_of, plan_of, settings, start, step, write_events

from shoal.core.errors import ShoalError
from shoal.cost.score import Score, run_id
from shoal.fields.federate.job import FederateJob, FederatePlan
from shoal.ir import kind_named
from shoal.machine.described import load
from shoal.train.layout import RunDir

pytestmark = pytest.mark.usefixtures("environment")


def federation(root: Path) -> None:
    job = FederateJob.model_validate({"clients": "2", "algorithm": "fedavg"})
    FederatePlan(job=job, machine=load("laptop"), predicted={}, parameters=7, samples=(5, 5)).save(
        RunDir(root).plan
    )
    Score().register(root, "federate", "federate")


def evaluate(version: int, accuracy: float) -> dict[str, object]:
    row = {"seconds": 2.0 * version, "up_bytes": 1e6 * version, "loss": 1.0, "accuracy": accuracy}
    return {"kind": "evaluate", "version": version, **row}


def test_curves_and_clients_of_a_run_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "federate"
    federation(root)
    write_events(root, start(1), evaluate(0, 0.1))
    client = client_of(settings(tmp_path))
    page = f"/runs/{run_id(root)}"
    assert "those to look at first" not in client.get(page).text
    arrived = {"seconds": 1.0, "stale": 2, "loss": 0.5}
    write_events(
        root,
        {"kind": "assign", "client": "<b>c0</b>"},
        {"kind": "arrive", "client": "<b>c0</b>", **arrived},
        {"kind": "arrive", "client": "c1", "seconds": "soon"},
        evaluate(1, 0.6),
        more=True,
    )
    text = client.get(page).text
    assert "Clients, 2 of 2, those to look at first" in text
    assert "&lt;b&gt;c0" in text
    assert "<b>c0</b>" not in text
    assert "1 invalid lines" in text
    time, nbytes, _ = client.get(f"{page}/curves").json()["plots"]
    assert (time["at"], time["series"][0]["values"]) == ([0.0, 2.0], [10.0, 60.0])
    assert nbytes["at"] == [0.0, 1.0]


def test_a_kind_that_follows_nothing_has_its_usual_page(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "train"
    plan_of("train").save(RunDir(root).plan)
    write_events(root, start(), step(0), step(1), evaluate(1, 0.6))
    Score().register(root, "train", "train")
    client = client_of(settings(tmp_path))
    titles = [one["title"] for one in client.get(f"/runs/{run_id(root)}/curves").json()["plots"]]
    assert titles[0] == "Loss"
    assert "Accuracy against time" not in titles


def test_a_failed_run_shows_its_error_and_every_run_its_kind(tmp_path: Path) -> None:
    root, data = tmp_path / "runs" / "rows", tmp_path / "rows.csv"
    data.write_text("x,y\n")
    kind = kind_named("prepare")
    job = kind.job_type.model_validate({"data": str(data), "name": "rows"})
    plan = kind.plan(job, load("laptop"))[0]
    with pytest.raises(ShoalError):
        kind.run(plan, root)
    assert read_events(root)[-1]["kind"] == "error"
    client = client_of(settings(tmp_path))
    page = client.get(f"/runs/{run_id(root)}").text
    assert "no rows; give a table with some" in page
    assert "ended unexpectedly" not in page
    assert '<p class="lead">prepare on laptop' in page
    assert "<td>prepare</td>" in client.get("/runs").text
    assert "<td>prepare</td>" in client.get("/plans").text
    # A run that was started again has not failed with what ended the start before.
    write_events(root, start(1), more=True)
    assert "no rows;" not in client.get(f"/runs/{run_id(root)}").text


def read_events(root: Path) -> list[dict[str, object]]:
    lines = RunDir(root).events.read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] != "totals"]
