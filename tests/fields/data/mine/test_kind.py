"""The job ``mine``: planned, run whole and sharded, stopped, refused, scored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from own_home import own_home
from shoal.app.cli import app
from shoal.core.errors import DataError, PlanError, ShoalError
from shoal.core.parts import Choice, table
from shoal.cost.score import Score
from shoal.fields.data.mine.generator import heaton_baskets
from shoal.fields.data.mine.job import MineJob
from shoal.fields.data.mine.kind import MineKind
from shoal.fields.data.mine.miners.costs import rates_of, timed
from shoal.fields.data.mine.protocols import MineError, TooManyError
from shoal.ir import Machine
from shoal.machine import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


BASKETS = [*heaton_baskets(600, 8, 0.5, seed=1).to_lists(), [], ["F1"] * 3]


def written(place: Path, form: str) -> Path:
    path = place / f"baskets.{form}"
    column = pa.table({"id": range(len(BASKETS)), "items": pa.array(BASKETS)})
    if form == "parquet":
        pq.write_table(column, path, row_group_size=150)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in column.to_pylist()))
    else:
        between = "," if form == "csv.txt" else " "
        path.write_text("".join(between.join(row) + "\n" for row in BASKETS))
    return path


def sets(directory: Path) -> dict[frozenset[str], int]:
    rows = pq.read_table(directory / "itemsets.parquet").to_pylist()
    assert [row["count"] for row in rows] == sorted((row["count"] for row in rows), reverse=True)
    return {frozenset(row["items"]): row["count"] for row in rows}


def run(job: MineJob, place: Path, **more: object):
    plan = MineKind().plan(job, load("laptop"))[0]
    return MineKind().run(plan, place, **more)


def test_plans_are_ranked_by_time() -> None:
    job = MineJob(data="baskets:3000:10:0.5", min_support=0.02)
    plans = list(MineKind().plan(job, load("laptop")))
    assert {plan.job.method.name for plan in plans if plan.job.method} == set(table("miner"))
    times = [plan.predicted["total_s"].value for plan in plans]
    assert times == sorted(times)
    assert "of a core of a server" in plans[0].notes[0]
    assert plans[0].num_baskets == 3000
    assert plans[0].least == 60


def test_the_same_from_every_format_and_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.fields.data.mine.inputs.SHARD_BYTES", 3000)
    expected = None
    for form in ("parquet", "jsonl", "txt", "csv.txt"):
        path = written(tmp_path, form)
        for sharded in (False, True):
            job = MineJob(
                data=str(path),
                min_support=0.04,
                sharded=sharded,
                separator="," if form == "csv.txt" else None,
                min_confidence=0.7,
            )
            place = tmp_path / f"{form}-{sharded}"
            report = run(job, place)
            found = sets(place)
            expected = expected or found
            assert found == expected
            assert report.details["baskets"] == len(BASKETS)
            assert report.measured["itemsets"] == len(found) > 30
            assert report.measured["rules"] == pq.read_table(place / "rules.parquet").num_rows > 5
            assert "<svg" in (place / "itemsets.svg").read_text()
    assert len(list((tmp_path / "txt-True" / "shards" / "mine").glob("*.items.npy"))) > 3


@pytest.mark.parametrize("target", ["closed", "maximal"])
def test_targets_in_shards(tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fields.data.mine.inputs.SHARD_BYTES", 3000)
    path = written(tmp_path, "txt")
    found = []
    for sharded in (False, True):
        job = MineJob(data=str(path), min_support=0.04, target=target, sharded=sharded)
        run(job, tmp_path / f"{sharded}")
        found.append(sets(tmp_path / f"{sharded}"))
    assert found[0] == found[1]
    assert len(found[0]) > (10 if target == "closed" else 0)


@pytest.mark.slow
@pytest.mark.multi
def test_shards_in_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "parquet")
    job = MineJob(data=str(path), min_support=0.04)
    run(job, tmp_path / "whole")
    pooled = job.model_copy(update={"sharded": True, "pool": Choice(name="local"), "workers": 2})
    run(pooled, tmp_path / "pooled")
    assert sets(tmp_path / "pooled") == sets(tmp_path / "whole")


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fields.data.mine.inputs.SHARD_BYTES", 3000)
    job = MineJob(data=str(written(tmp_path, "txt")), min_support=0.04, sharded=True)
    events = []

    def stop(event: dict[str, object]) -> None:
        events.append(event)
        if "mine: shard 3" in str(event.get("state")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "run", watch=stop)
    assert not (tmp_path / "run" / "itemsets.parquet").exists()
    done = tmp_path / "run" / "shards" / "mine" / "000000.items.npy"
    before = done.stat().st_mtime_ns
    run(job, tmp_path / "run", resume=True)
    assert done.stat().st_mtime_ns == before
    run(job.model_copy(update={"sharded": False}), tmp_path / "whole")
    assert sets(tmp_path / "run") == sets(tmp_path / "whole")


def test_packages_are_baskets(tmp_path: Path) -> None:
    job = MineJob(data="debian", min_support=0.05, max_len=2)
    if not Path("/var/lib/dpkg/status").exists():
        with pytest.raises(DataError, match="no index of packages"):
            run(job, tmp_path / "run")
        return
    report = run(job, tmp_path / "run")
    assert report.measured["itemsets"] >= 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "baskets:x"}, ShoalError, "baskets"),
        ({"data": "baskets:100:a"}, MineError, "expected baskets:N"),
        ({"data": "nowhere.parquet"}, DataError, "nowhere"),
        ({"target": "closed", "min_confidence": 0.5}, MineError, "rules need all frequent sets"),
        ({"column": "id"}, MineError, "column = 'id': has int64, not lists"),
        ({"column": "x"}, MineError, "column = 'x'"),
    ],
)
def test_bad_jobs(changes, error, message, tmp_path: Path) -> None:
    data = {"data": str(written(tmp_path, "parquet"))}
    with pytest.raises(error, match=message):
        MineKind().plan(MineJob(**{**data, **changes}), load("laptop"))


@pytest.mark.parametrize("support", [0, -1, 0.0, 1.5, -0.1])
def test_bad_support(support: float) -> None:
    with pytest.raises(ValidationError):
        MineJob(data="debian", min_support=support)


def test_files_without_baskets(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": [[1]], "b": [[2]]}), tmp_path / "b.parquet")
    for name, message in (("a", "no column of lists among a"), ("b", "several columns of lists")):
        with pytest.raises(MineError, match=message):
            MineKind().plan(MineJob(data=str(tmp_path / f"{name}.parquet")), load("laptop"))


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"items": ["a", "b"]}\n{"items": ["a"\n{"items": ["b", "a"]}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, byte 22: not JSON"):
        MineKind().plan(MineJob(data=str(path)), load("laptop"))
    report = run(MineJob(data=str(path), bad="skip", min_support=1), tmp_path / "run")
    assert report.details["bad_rows"] == 1
    assert sets(tmp_path / "run")[frozenset("ab")] == 2


def test_too_many_sets_leave_nothing(tmp_path: Path) -> None:
    job = MineJob(data="baskets:2000:12:0.9", min_support=0.02, max_itemsets=50)
    with pytest.raises(TooManyError, match="max_itemsets = 50"):
        run(job, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.parquet"))


def test_what_does_not_fit_is_not_planned() -> None:
    machine: Machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": 200_000_000})
    device = machine.device.model_copy(update={"memory": (tier,)})
    small = machine.model_copy(update={"device": device})
    with pytest.raises(PlanError, match=r"are needed; give --set sharded=true"):
        MineKind().plan(MineJob(data="baskets:20000:20:0.5", min_support=0.3), small)


@pytest.mark.slow
def test_rates_are_timed_here_and_assumed_elsewhere() -> None:
    here, there = timed(), rates_of(load("laptop"))
    assert here.measured
    assert not there.measured
    for rates in (here, there):
        values = rates.model_dump(exclude={"spread", "measured"}).values()
        assert all(0 <= value < 1e-4 for value in values)
        assert sum(value > 0 for value in values) > 5


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["baskets:2000:8", "--min-support", "0.05", "--min-confidence", "0.8", "-m", "laptop"]
    planned = CliRunner().invoke(app, ["plan", "mine", *words, "--out", "plan.yaml"])
    assert planned.exit_code == 0, planned.output
    assert "eclat" in planned.output
    command = ["run", "mine", "--plan", "plan.yaml", "--dir", "out", "-m", "laptop", "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in ("prediction and measurement", "itemsets.parquet", "rules.parquet"):
        assert text in done.output
    refused = CliRunner().invoke(app, ["plan", "mine", "baskets:x", "-m", "laptop"])
    assert isinstance(refused.exception, ShoalError)
    assert "mine" in CliRunner().invoke(app, ["score"]).output


@pytest.mark.slow
def test_neither_plan_nor_run_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from shoal.fields.data.mine.kind import MineKind\n"
        "from shoal.machine import load\n"
        "kind = MineKind()\n"
        "plan = kind.plan(kind.job_type(data='baskets:500'), load('laptop'))[0]\n"
        f"assert kind.run(plan, Path({str(tmp_path / 'run')!r})).measured['itemsets'] > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_runs_are_scored(tmp_path: Path) -> None:
    run(MineJob(data="baskets:500", min_support=0.05), tmp_path / "run")
    scored = {row.quantity for row in Score().rows()}
    assert {"total_s", "itemsets", "memory_bytes"} <= scored
