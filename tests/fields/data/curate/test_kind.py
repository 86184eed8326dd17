"""The job ``curate``: planned, run in and out of this process, stopped, and what was dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from own_home import own_home
from shoal.core.errors import ConfigError, PlanError
from shoal.core.parts import Choice
from shoal.cost.score import Score
from shoal.fields.data.curate.job import CurateJob
from shoal.fields.data.curate.kind import CurateKind
from shoal.machine import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for file in range(3):
        rows = [{"id": 1000 * file + at, "text": f"text {at}"} for at in range(1000)]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{file}.parquet")
    return place


def kept(directory: Path) -> list[int]:
    files = sorted((directory / "kept").glob("*.parquet"))
    return [at for file in files for at in pq.read_table(file).column("id").to_pylist()]


def test_random_rows(tmp_path: Path, data: Path) -> None:
    kind, machine = CurateKind(), load("laptop")
    job = CurateJob(data=str(data), method=Choice(name="random"), keep=0.3, seed=3)
    (plan,) = kind.plan(job, machine)
    assert plan.rows == 3000
    report = kind.run(plan, tmp_path / "run")
    rows = kept(tmp_path / "run")
    assert report.measured["kept_share"] == len(rows) / 3000 == pytest.approx(0.3, abs=0.05)
    assert len(set(rows)) == len(rows)
    assert report.details["stages"][0]["dropped"] == 3000 - len(rows)
    assert {"total_s", "bytes_per_s", "memory_bytes"} <= set(report.errors)
    assert {row.name for row in Score().rows()} == {"curate"}
    again = kind.run(plan, tmp_path / "run", resume=True)
    assert again.measured == report.measured
    with pytest.raises(ConfigError, match="already contains a run"):
        kind.run(plan, tmp_path / "run")


def test_the_planner_offers_what_fits(data: Path) -> None:
    job = CurateJob(data=str(data))
    plans = CurateKind().plan(job, load("laptop"))
    assert [str(plan.job.method) for plan in plans] == ["random", "filters"]
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": 1e6})
    device = machine.device.model_copy(update={"memory": (tier,)})
    with pytest.raises(PlanError, match="no method fits"):
        CurateKind().plan(job, machine.model_copy(update={"device": device}))
