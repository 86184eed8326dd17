"""The job ``prepare``: profiled, guided, run, edited, stopped, refused."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from own_home import own_home
from shoal.app.cli import app
from shoal.core.errors import DataError, PlanError, ShoalError
from shoal.core.parts import Choice
from shoal.fields.data.prepare import batches
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.generator import dirty_batch
from shoal.fields.data.prepare.guide import guide, work_of
from shoal.fields.data.prepare.job import PrepareJob
from shoal.fields.data.prepare.kind import PrepareKind
from shoal.fields.data.prepare.pipeline import PrepPipeline
from shoal.ir import Machine
from shoal.machine import load


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    monkeypatch.setattr(batches, "SHARD_BYTES", 20_000)


def written(place: Path, rows: int = 3000, **columns: object) -> str:
    table = pa.Table.from_batches([dirty_batch(rows, 1, 0)])
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, place / "rows.parquet", row_group_size=500)
    return str(place / "rows.parquet")


def with_memory(capacity: float) -> Machine:
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": capacity})
    device = machine.device.model_copy(update={"memory": (tier,)})
    return machine.model_copy(update={"device": device})


def run(job: PrepareJob, place: Path, **more: object):
    plan = PrepareKind().plan(job, load("laptop"))[0]
    return PrepareKind().run(plan, place, **more)


def rows_of(directory: Path) -> pa.Table:
    return pq.read_table(sorted(directory.glob("*.parquet"))[0].parent)


def test_the_guide_gives_a_reason_for_each_step(tmp_path: Path) -> None:
    guided, usual = PrepareKind().plan(
        PrepareJob(data=written(tmp_path), target="y"), load("laptop")
    )
    assert [one.name for one in guided.job.steps] == [
        *("drop_columns", "types", "outliers", "impute", "impute", "impute", "impute"),
        *("target_encode", "one_hot", "scale"),
    ]
    assert [one.name for one in usual.job.steps] == ["drop_missing", "one_hot", "scale"]
    reasons = {one.step.partition("(")[0]: one.reason for one in guided.reasons}
    assert "id: a different text in almost every row" in reasons["drop_columns"].measured
    assert "empty: 100 % missing" in reasons["drop_columns"].measured
    assert "unit: one value only" in reasons["drop_columns"].measured
    assert reasons["types"].measured.startswith("height: 100.0 % numbers; city: 6 texts, 4 up to")
    assert "income" in reasons["outliers"].measured
    assert "shop: 300 categories" in reasons["target_encode"].measured
    assert all(one.reason.rule and one.seconds >= 0 for one in guided.reasons)
    assert guided.passes == 3
    profile = {one.name: one for one in guided.profile.columns}
    ages = np.array(
        [x for x in pq.read_table(tmp_path / "rows.parquet")["age"].to_pylist() if x == x]
    )
    assert profile["age"].mean == pytest.approx(ages.mean(), rel=1e-12)
    assert profile["age"].std == pytest.approx(ages.std(), rel=1e-12)
    assert profile["age"].missing == pytest.approx(1 - len(ages) / 3000)
    assert profile["height"].quantiles[3] == pytest.approx(1.75, abs=0.01)


def test_little_memory_changes_the_plan(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    wide = {f"x{at:03}": random.normal(size=2000) for at in range(100)}
    pq.write_table(pa.table(wide), tmp_path / "wide.parquet")
    job = PrepareJob(data=str(tmp_path / "wide.parquet"))
    plan = PrepareKind().plan(job, with_memory(64e9))[0]
    assert plan.job.batch_rows == 65_536
    many = plan.profile.model_copy(update={"rows": 10**7})  # 8 GB of numbers

    def steps(capacity: float) -> list[str]:
        machine = with_memory(capacity)
        return [choice.name for choice, _ in guide(work_of(many, "", machine), machine)]

    assert steps(64e9) == ["scale"]
    assert steps(24e9) == ["scale", "pca"]
    assert steps(4e9) == ["reservoir", "scale", "pca"]
    small = PrepareKind().plan(job, with_memory(512e6))[0]
    assert small.job.batch_rows < 65_536
    assert any(one.startswith(f"batches of {small.job.batch_rows:,} rows") for one in small.notes)
    assert small.predicted["memory_bytes"].value < 512e6
    with pytest.raises(PlanError, match="are needed for batches of 1,024 rows"):
        PrepareKind().plan(job, with_memory(1e8))


def test_a_run_is_what_the_pipeline_does_in_memory(tmp_path: Path) -> None:
    job = PrepareJob(data=written(tmp_path), target="y", batch_rows=300)
    report = run(job, tmp_path / "run")
    made = PrepPipeline.load(tmp_path / "run" / "pipeline.json")
    whole = pq.read_table(tmp_path / "rows.parquet")
    out = rows_of(tmp_path / "run" / "prepared")
    assert out.num_rows == report.measured["rows"] == 3000
    assert report.measured["columns_prepared"] == out.num_columns
    again = made.transform(whole)  # as held-out rows: only target encoding differs
    assert again.column_names == out.column_names
    for name in set(out.column_names) - {"shop~y"}:
        assert out[name].to_pylist() == pytest.approx(again[name].to_pylist(), abs=1e-12)
    assert np.corrcoef(out["shop~y"], again["shop~y"])[0, 1] > 0.9
    assert not any(column.null_count for column in out.columns)
    alone = PrepPipeline(made.steps, "y").fit(whole)
    for ours, theirs in zip(made.fitted, alone.fitted, strict=True):
        for name, value in ours.learned.items():
            if isinstance(value, float):
                assert value == pytest.approx(theirs.learned[name], rel=0.02)
    page = (tmp_path / "run" / "profile.html").read_text()
    assert "before: 3,000 rows" in page
    assert "after: 3,000 rows" in page


def test_held_out_rows_teach_nothing(tmp_path: Path) -> None:
    """Numbers, texts and targets of held-out rows are changed: what is learned is the same."""
    job = PrepareJob(data=written(tmp_path), target="y", holdout=0.3)
    report = run(job, tmp_path / "one")
    held = report.details["held_out"]
    assert 700 < held < 1100
    assert rows_of(tmp_path / "one" / "held_out").num_rows == held
    plan = PrepareKind().plan(job, load("laptop"))[0]
    table = pq.read_table(tmp_path / "rows.parquet")
    shards = batches.PrepTable(job.data, "y", 0.3).shards(batches.BadRowCount())
    keep = np.concatenate(
        [
            np.isin(np.arange(size), np.concatenate([b.places for b in shard.batches()]) % 2**40)
            for shard, size in (
                (shard, sum(b.num_rows for b in shard.source.batches())) for shard in shards
            )
        ]
    )
    assert (~keep).sum() == held
    for name, planted in (("y", 1e9), ("age", 1e9), ("income", 1e12)):
        values = np.where(keep, table[name].to_numpy(), planted)
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=500)
    PrepareKind().run(plan, tmp_path / "two")
    learned = [(tmp_path / one / "pipeline.json").read_bytes() for one in ("one", "two")]
    assert learned[0] == learned[1]
    before, after = (rows_of(tmp_path / one / "prepared") for one in ("one", "two"))
    assert before.equals(after)


def test_a_planted_target_is_suspected(tmp_path: Path) -> None:
    y = dirty_batch(3000, 1, 0).column("y").to_numpy()
    data = written(tmp_path, copy=3 * y - 1, near=y + np.random.default_rng(2).normal(size=3000))
    notes = PrepareKind().plan(PrepareJob(data=data, target="y"), load("laptop"))[0].notes
    assert any(one.startswith("copy: association 1.00000 with y, beyond 0.999") for one in notes)
    assert not any(one.startswith("near") for one in notes)
    label = np.where(y > 20, "high", "low")
    data = written(tmp_path, label=label, code=(y > 20).astype(int))
    notes = PrepareKind().plan(PrepareJob(data=data, target="label"), load("laptop"))[0].notes
    assert [one.partition(":")[0] for one in notes if "association" in one] == ["code"]


def test_mixed_types_are_said(tmp_path: Path) -> None:
    mixed = [str(at) if at % 20 else "many" for at in range(3000)]
    plan = PrepareKind().plan(PrepareJob(data=written(tmp_path, mixed=mixed)), load("laptop"))[0]
    assert any(one.startswith("mixed: mixed types, 5 % of its texts") for one in plan.notes)
    PrepareKind().run(plan, tmp_path / "run")
    assert rows_of(tmp_path / "run" / "prepared")["mixed"].null_count == 0


def test_steps_may_be_edited(tmp_path: Path) -> None:
    job = PrepareJob(data=written(tmp_path), target="y")
    plan = PrepareKind().plan(job, load("laptop"))[0]
    plan.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    assert "measured:" in text
    edited = plan.model_copy(
        update={
            "job": plan.job.model_copy(update={"steps": (*plan.job.steps[:-1], Choice(name="pca"))})
        }
    )
    edited.save(tmp_path / "plan.yaml")
    report = PrepareKind().run(type(plan).load(tmp_path / "plan.yaml"), tmp_path / "run")
    assert report.measured["columns_prepared"] == rows_of(tmp_path / "run" / "prepared").num_columns
    assert "pc0" in rows_of(tmp_path / "run" / "prepared").column_names


@pytest.mark.multi
@pytest.mark.slow
def test_a_pool_changes_nothing(tmp_path: Path) -> None:
    job = PrepareJob(data=written(tmp_path), target="y")
    run(job, tmp_path / "alone")
    pooled = job.model_copy(update={"pool": Choice(name="local"), "workers": 2})
    run(pooled, tmp_path / "pooled")
    for name in ("pipeline.json", "prepared/000000.parquet", "prepared/000002.parquet"):
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "pooled" / name).read_bytes()


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    job = PrepareJob(data=written(tmp_path), target="y")

    def stop(event: dict[str, object]) -> None:
        if "preparing: shard 2" in str(event.get("state")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, tmp_path / "run", watch=stop)
    done = tmp_path / "run" / "prepared" / "000000.parquet"
    before = done.stat().st_mtime_ns
    assert not (tmp_path / "run" / "report.json").exists()
    run(job, tmp_path / "run", resume=True)
    assert done.stat().st_mtime_ns == before
    run(job, tmp_path / "whole")
    assert rows_of(tmp_path / "run" / "prepared") == rows_of(tmp_path / "whole" / "prepared")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "dirty:x"}, ShoalError, "dirty"),
        ({"data": "nowhere.parquet"}, DataError, "nowhere"),
        ({"target": "z"}, PrepareError, "target = 'z': no such column"),
        ({"steps": [{"name": "scale", "columns": ["z"]}]}, PrepareError, "no column 'z'"),
        ({"steps": ["drop_missing", "scale"]}, PrepareError, "no rows are left for scale"),
        ({"steps": ["drop_missing"]}, PrepareError, "of 3,000 rows none is left"),
        (
            {"holdout": 0.2, "steps": [{"name": "k_anonymity", "columns": ["age"]}]},
            PrepareError,
            "held-out rows would not be counted",
        ),
    ],
)
def test_bad_jobs(changes, error, message, tmp_path: Path) -> None:
    job = PrepareJob.model_validate({"data": written(tmp_path), **changes})
    with pytest.raises(error, match=message):
        run(job, tmp_path / "run")
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({"x": pa.array([], pa.float64())}, {}, "no rows; give a table with some"),
        ({"x": [None] * 5, "k": pa.array([None] * 5, pa.string())}, {}, "no column is left"),
        ({"x": [[1]] * 5}, {"target": "x"}, "target = 'x': is list<.*>; expected numbers or text"),
        ({"k": ["a", "b"] * 3, "k=a": range(6)}, {}, "there is a column 'k=a' already"),
        ({"k\x1f": [1, 2]}, {}, "not printable"),
    ],
)
def test_odd_tables_are_refused(columns, changes, message, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(PrepareError, match=message):
        run(PrepareJob(data=str(tmp_path / "rows.parquet"), **changes), tmp_path / "run")


def test_every_type_is_read(tmp_path: Path) -> None:
    day = datetime.date(1970, 1, 3)
    columns = {
        "day": [day, day, None, day],
        "time": [datetime.datetime(1970, 1, 2, at) for at in range(4)],
        "flag": [True, False, None, True],
        "code": pa.array(["a", "b", "a", "b"]).dictionary_encode(),
        "price": pa.array([1, 2, 3, 4]).cast(pa.decimal128(22, 2)),
        "big": [1.0, 2.0, 1e300, float("inf")],
        "list": [[1]] * 4,
        "bytes": [b"a"] * 4,
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    plan = PrepareKind().plan(PrepareJob(data=str(tmp_path / "rows.parquet")), load("laptop"))[0]
    profile = {one.name: one for one in plan.profile.columns}
    assert profile["day"].mean == 2
    assert profile["time"].low == 1
    assert (profile["flag"].mean, profile["flag"].missing) == (pytest.approx(2 / 3), 0.25)
    assert (profile["big"].mean, profile["big"].missing) == (1.5, 0.5)
    PrepareKind().run(plan, tmp_path / "run")
    names = rows_of(tmp_path / "run" / "prepared").column_names
    assert names == ["time", "flag", "price", "big", "code=a", "code=b"]


def test_classes_that_are_too_many_are_not_encoded_by(tmp_path: Path) -> None:
    rows = {"y": [f"c{at % 60}" for at in range(240)], "k": [f"k{at % 40}" for at in range(240)]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    job = PrepareJob(data=str(tmp_path / "rows.parquet"), target="y")
    report = run(job, tmp_path / "run")
    assert [one.name for one in report.plan.job.steps] == ["types", "hash_encode"]


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": 1.0}\n{"x": 1\n{"x": 3.0}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, byte 11: not JSON"):
        run(PrepareJob(data=str(path)), tmp_path / "run")
    report = run(PrepareJob(data=str(path), bad="skip"), tmp_path / "run")
    assert report.details["bad_rows"] == 1
    assert rows_of(tmp_path / "run" / "prepared")["x"].to_pylist() == [-1.0, 1.0]


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["prepare", "dirty:3000", "--target", "y", "-m", "laptop"]
    planned = CliRunner().invoke(app, ["plan", *words, "--out", "plan.yaml"])
    assert planned.exit_code == 0, planned.output
    for text in ("drop_columns", "300 categories", "instead: defaults", "predicted"):
        assert text in planned.output
    shown = CliRunner().invoke(app, ["plan", *words, "-o", "json"])
    assert json.loads(shown.stdout)
    command = ["run", "prepare", "--plan", "plan.yaml", "--dir", "out", "-m", "laptop", "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in ("prediction and measurement", "after: 3,000 rows", "profile.html"):
        assert text in done.output


@pytest.mark.slow
def test_neither_plan_nor_run_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from shoal.fields.data.prepare.kind import PrepareKind\n"
        "from shoal.machine import load\n"
        "kind = PrepareKind()\n"
        "plan = kind.plan(kind.job_type(data='dirty:500', target='y'), load('laptop'))[0]\n"
        f"assert kind.run(plan, Path({str(tmp_path / 'run')!r})).measured['rows'] == 500\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
