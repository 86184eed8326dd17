"""The method ``prune`` of the job ``curate``: planned, run on vectors and text, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from own_home import own_home

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.fields.data.curate.job import CurateJob, CurateReport
from shoal.fields.data.curate.kind import CurateKind
from shoal.fields.data.prune.costs import prune_rates
from shoal.machine import load
from shoal.machine.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def run(place: Path, data: str, keep: float = 0.7, **values: Any) -> CurateReport:
    method = {"name": "prune", **values.pop("method", {})}
    job = CurateJob.model_validate({"data": data, "keep": keep, "method": method, **values})
    (plan,) = CurateKind().plan(job, load("laptop"))
    return CurateKind().run(plan, place)


def kept(place: Path) -> pa.Table:
    return pa.concat_tables(
        [pq.read_table(file) for file in sorted((place / "kept").glob("*.parquet"))]
    )


def test_digits(tmp_path: Path) -> None:
    report = run(tmp_path / "run", "digits", method={"scorer": "ssl_prototypes"})
    table, scores = kept(tmp_path / "run"), pq.read_table(tmp_path / "run" / "scores.parquet")
    assert (
        table.num_rows
        == round(0.7 * 1797)
        == report.details["stages"][0]["rows"] - report.details["stages"][0]["dropped"]
    )
    assert report.measured["kept_share"] == table.num_rows / 1797
    assert report.details["advice"]["side"] == "hard"
    values, chosen = scores["score"].to_numpy(), scores["kept"].to_numpy(zero_copy_only=False)
    assert chosen.sum() == table.num_rows
    assert values[chosen].mean() > values[~chosen].mean()
    for size, left in report.details["classes"].values():
        assert left >= 0.35 * size
    assert not (tmp_path / "run" / "vectors").exists()
    assert set(table.column_names) == {"vector", "label"}


def test_shards_keep_the_rows_that_were_chosen(tmp_path: Path) -> None:
    """The same rows, from one file or many, with text as labels; every bad row is passed over."""
    draw = np.random.default_rng(0)
    X, y = draw.normal(size=(300, 5)), draw.integers(0, 3, 300)
    for name, files in (("one", 1), ("many", 4)):
        (tmp_path / name).mkdir()
        for number, rows in enumerate(np.array_split(np.arange(300), files)):
            table = pa.table(
                {
                    "id": [f"r{at}" for at in rows],
                    "x": X[rows].tolist(),
                    "kind": [f"k{y[at]}" for at in rows],
                }
            )
            pq.write_table(table, tmp_path / name / f"{number}.parquet")
    rows = {}
    for name in ("one", "many"):
        report = run(
            tmp_path / f"run {name}".replace(" ", ""),
            str(tmp_path / name),
            0.4,
            method={"label": "kind", "scorer": "prototypes", "selector": "keep_hardest"},
        )
        rows[name] = kept(tmp_path / f"run{name}")["id"].to_pylist()
        assert set(report.details["classes"]) == {"k0", "k1", "k2"}
    assert rows["one"] == rows["many"]
    means = np.stack([X[y == c].mean(axis=0) for c in range(3)])
    far = np.argsort(-np.linalg.norm(X - means[y], axis=1))[:120]
    assert set(rows["one"]) == {f"r{at}" for at in far}


def test_text_without_labels(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for at in range(40):
        words = "the sum of two numbers is a number" if at else "xyzzy plugh frobnicate qux"
        (tmp_path / "notes" / f"{at:02}.txt").write_text(f"{words} {at % 3}\n" * 5)
    method = {
        "selector": {"name": "balanced", "side": "hard"},
        "scorer": {"name": "ssl_prototypes", "prototypes": 2},
    }
    report = run(tmp_path / "run", str(tmp_path / "notes"), 0.5, method=method)
    assert report.measured["rows"] == 40
    assert kept(tmp_path / "run").num_rows == 20


def test_the_planner_asks_the_theory(tmp_path: Path) -> None:
    plans = CurateKind().plan(CurateJob(data="digits"), load("laptop"))
    spelled = [str(plan.job.method) for plan in plans]
    assert "random" in spelled
    assert any("ssl_prototypes" in one or one.startswith("prune(selector") for one in spelled)
    assert all("easy" not in one for one in spelled)
    proposed = {
        plan.job.method.options.get("keep") for plan in plans if plan.job.method is not None
    }
    assert any(keep is not None and keep < 0.5 for keep in proposed)
    few = tmp_path / "few.npy"
    np.save(few, np.random.default_rng(0).normal(size=(40, 64)))
    easy = [
        str(plan.job.method)
        for plan in CurateKind().plan(CurateJob(data=str(few), keep=0.5), load("laptop"))
    ]
    assert any("easy" in one for one in easy)
    assert not any("el2n" in one for one in easy)  # no labels


def test_bad_input(tmp_path: Path) -> None:
    def refused(error: type[ShoalError], said: str, data: str = "digits", **values: Any) -> None:
        with pytest.raises(error, match=said):
            run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", data, **values)

    refused(
        DataError,
        "method.label: there is no 'class'; it has vector, label",
        method={"label": "class"},
    )
    refused(DataError, "not classes", method={"label": "vector"})
    refused(ConfigError, "best", method={"scorer": "best"})
    refused(ConfigError, "keep", method={"keep": 0.0})
    with pytest.raises(ValueError, match="keep"):
        CurateJob(data="digits", keep=0)
    refused(DataError, "at_least = 500", method={"selector": {"name": "balanced", "at_least": 500}})
    path = tmp_path / "x.jsonl"
    path.write_text('{"v": [1, 2], "label": "a"}\n{"v": [1], "label": "b"}\n')
    refused(DataError, "different lengths", str(path))
    path.write_text('{"v": [1, 2], "label": "a"}\n{"v": [1, 3]}\n')
    refused(DataError, "1 rows have no 'label'", str(path))
    path.write_text('{"v": [1.5, null], "label": "a"}\n{"v": [1, 3], "label": "b"}\n')
    refused(DataError, "row 0 of 2 has NaN", str(path))
    path.write_text('{"v": [1, 2]}\n{"v": [1, 3]}\n')
    refused(DataError, "needs classes; name their column", str(path), method={"scorer": "el2n"})
    path.write_text('{"v": [1, 2]}\n')
    refused(DataError, "n_samples = 1", str(path))


def test_rates_are_timed_once_on_this_machine() -> None:
    here = load("laptop").model_copy(update={"fingerprint": fingerprint()})
    rates = prune_rates(here)
    assert rates.measured
    assert min(rates.mac_s, rates.distance_s, rates.ngram_s) > 0
    assert prune_rates(here) == rates
    assert not prune_rates(load("laptop")).measured
