"""The method ``projektor``: planned, run, gone on with, and what it reads and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from own_home import own_home

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")
pytest.importorskip("ot")

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.core.errors import ShoalError
from shoal.fields.data.curate.job import CurateJob, CurateReport
from shoal.fields.data.curate.kind import CurateKind
from shoal.fields.data.curate.projektor import rows as method
from shoal.fields.data.curate.projektor.revealing import SourceRows
from shoal.machine import load

ROWS, SMALLER, LARGER = 120, 20, 40


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))
    monkeypatch.setattr(method, "_MIXTURES", 12)
    monkeypatch.setattr(method, "_PROBES", 1)


def table(ones: float, seed: int, n: int = ROWS) -> pa.Table:
    draw = np.random.default_rng(seed)
    label = (draw.random(n) < ones).astype(np.int64)
    label[:2] = 0, 1
    vectors = (draw.normal(size=(n, 3)) + label[:, None]).astype(np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3)
    return pa.table({"id": 1000 * seed + np.arange(n), "vector": lists, "label": label})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    pq.write_table(table(0.8, 1), place / "a.parquet")
    pq.write_table(table(0.2, 2), place / "b.parquet")
    pq.write_table(table(0.5, 3), tmp_path / "validation.parquet")
    return place


def job(data: Path, **options: Any) -> CurateJob:
    values = {"name": "projektor", "validation": str(data.parent / "validation.parquet")}
    chosen = {**values, "smaller": SMALLER, "larger": LARGER, **options}
    return CurateJob.model_validate({"data": str(data), "columns": ["vector"], "method": chosen})


def run(data: Path, name: str = "run", resume: bool = False, **options: Any) -> CurateReport:
    (plan,) = CurateKind().plan(job(data, **options), load("laptop"))
    return CurateKind().run(plan, data.parent / name, resume=resume)


def kept(place: Path) -> pa.Table:
    return pa.concat_tables(map(pq.read_table, sorted((place / "kept").glob("*.parquet"))))


def test_files_are_sources(data: Path) -> None:
    report = run(data, size=100)
    ids = kept(data.parent / "run").column("id").to_numpy()
    assert len(ids) == len(set(ids)) == 100
    counts = {"a.parquet": int((ids < 2000).sum()), "b.parquet": int((ids >= 2000).sum())}
    assert report.details["kept"] == counts
    chosen = report.details["mixtures"][0]
    assert chosen["shares"]["a.parquet"] == pytest.approx(counts["a.parquet"] / 100, abs=0.01)
    assert report.measured["predicted_score"] == pytest.approx(chosen["predicted"])
    assert 0 < report.measured["score"] <= 1
    assert [one["mixture"] for one in report.details["mixtures"]] == [
        *("chosen", "equal", "a.parquet", "b.parquet")
    ]
    (shown,) = (
        block
        for block in CurateKind().results(report, data.parent / "run")
        if not isinstance(block, str) and block.title.startswith("scores of 100 rows")
    )
    assert [row[0] for row in shown.rows] == ["chosen", "equal", "a.parquet", "b.parquet"]
    assert not (data.parent / "run" / "revealed").exists()
    again = run(data, size=100, resume=True)
    assert again.measured == report.measured


def test_a_stopped_run_goes_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(data, "whole", size=100)
    write, done = method.write_chosen, []

    def stops(shard: Any, place: Path, shared: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(place)
        return write(shard, place, shared)

    monkeypatch.setattr(method, "write_chosen", stops)
    with pytest.raises(KeyboardInterrupt):
        run(data, size=100)
    monkeypatch.setattr(method, "write_chosen", write)
    report = run(data, size=100, resume=True)
    assert report.details["mixtures"] == expected.details["mixtures"]
    assert kept(data.parent / "run").equals(kept(data.parent / "whole"))


def test_a_column_has_the_sources_and_others_are_never_read(data: Path, tmp_path: Path) -> None:
    """Rows that are not revealed have no numbers; whoever reads one is refused."""
    both = pa.concat_tables([table(0.8, 1), table(0.2, 2)])
    both = both.append_column("corpus", pa.array(["x"] * ROWS + ["y"] * ROWS))
    rows = SourceRows(["x", "y"], np.repeat([0, 1], ROWS), (2 * ROWS,), None)  # type: ignore[arg-type]
    revealed = rows.drawn([LARGER] * 2, 0)
    assert len(revealed) == 2 * LARGER
    hidden = np.setdiff1d(np.arange(2 * ROWS), revealed)
    vectors = np.array(both.column("vector").to_pylist(), np.float32)
    vectors[hidden] = np.nan
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 3)
    one = tmp_path / "one.parquet"
    pq.write_table(both.set_column(1, "vector", lists), one)
    values = {"source": "corpus", "validation": str(tmp_path / "validation.parquet")}
    # No more is kept of a source than was revealed, so that nothing else is read afterwards.
    report = run(one, size=LARGER, **values)
    assert np.isfinite(report.measured["score"])
    assert set(report.details["kept"]) == {"x", "y"}
    with pytest.raises(ShoalError, match="NaN"):
        run(one, "more", size=2 * ROWS - 10, **values)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation": ""}, "method.validation: empty"),
        ({"validation": "nowhere.parquet"}, "method.validation: .*nowhere.parquet"),
        ({"source": "corpus"}, "method.source: there is no 'corpus'"),
        ({"label": "stars"}, "there is no 'stars'"),
        ({"size": 241}, "method.size = 241: expected at most 240"),
        ({"larger": 121}, "source 'a.parquet': it has 120 rows, and 121 are wanted"),
    ],
)
def test_bad_options(data: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ShoalError, match=says) as error:
        run(data, **options)
    assert "\n" not in str(error.value)
    assert not list((data.parent / "run").glob("kept/*.parquet"))


def test_bad_data(data: Path, tmp_path: Path) -> None:
    (data / "b.parquet").unlink()
    with pytest.raises(ShoalError, match="1 source; expected two or more"):
        run(data)
    pq.write_table(table(0.5, 3).drop_columns(["label"]), tmp_path / "none.parquet")
    pq.write_table(table(0.2, 2), data / "b.parquet")
    with pytest.raises(ShoalError, match="there is no 'label'"):
        run(data, "two", validation=str(tmp_path / "none.parquet"))
    no_ones = table(0.0, 2)
    zeros = pa.array(np.zeros(ROWS, np.int64))
    pq.write_table(no_ones.set_column(2, "label", zeros), data / "b.parquet")
    with pytest.raises(ShoalError, match=r"source b\.parquet: no revealed row is of class 1"):
        run(data, "three")
