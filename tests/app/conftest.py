"""Lets the tests of this room share modules that are no tests, and a home for the dashboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from starlette.testclient import TestClient

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some runs in every state, in a store of their own."""
    from dash_home import beat, make_run, plan_of

    from shoal.cost.score import Score
    from shoal.ir import TrainReport
    from shoal.machine.described import load

    place = tmp_path_factory.mktemp("home")
    load("laptop").save(place / "machine.yaml")
    score = Score(place / "score.db")
    runs = place / "runs"
    make_run(score, runs / "done")
    make_run(score, runs / "asked-to-stop", end="stop", steps=12)
    make_run(score, runs / "killed", end=None, report=False)
    beat(runs / "killed", 3600)
    make_run(score, runs / "alive", model="shoal-8m", end=None, report=False, steps=7)
    score.append(TrainReport(plan=plan_of("before"), measured={"step_s": 0.025}))
    return place


@pytest.fixture
def environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home of these tests, and a run in it that is alive."""
    from dash_home import beat

    monkeypatch.setenv("SHOAL_HOME", str(home))
    beat(home / "runs" / "alive", 0.5)


@pytest.fixture(scope="module")
def client(home: Path) -> TestClient:
    """A browser that looks at it."""
    from dash_home import client_of, settings

    return client_of(settings(home))
