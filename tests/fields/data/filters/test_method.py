"""The method ``filters`` of the job ``curate``: planned, run, stopped, and its effect on loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from own_home import own_home
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice
from shoal.core.tables import Table
from shoal.fields.data.curate.effect import EffectSettings, change
from shoal.fields.data.curate.job import CurateJob, CurateReport
from shoal.fields.data.curate.kind import CurateKind
from shoal.machine import load
from shoal.machine.fingerprint import fingerprint

GOOD = "The {0} cat sat down with the dog number {0}, and that was the end of it for today.\n" * 4
FILTERS = ["gopher_quality", {"name": "length", "max_chars": 2000}, "pii", "length"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    for file in range(3):
        texts = [GOOD.format(1000 * file + at) for at in range(100)]
        texts[3], texts[4], texts[5] = "short", None, ""
        texts[6] += "write to ann@example.com"
        texts[7] = "".join(GOOD.format(n) for n in range(20))
        rows = [{"id": 1000 * file + at, "text": text} for at, text in enumerate(texts)]
        pq.write_table(pa.Table.from_pylist(rows), place / f"{file}.parquet")
    return place


def job_of(data: Path, filters: list[Any] = FILTERS, **options: Any) -> CurateJob:
    method = Choice(name="filters", options={"filters": filters})
    return CurateJob(data=str(data), method=method, **options)


def run(job: CurateJob, place: Path, **options: Any) -> CurateReport:
    (plan,) = CurateKind().plan(job, load("laptop"))
    return CurateKind().run(plan, place, **options)


def rows(place: Path) -> list[dict[str, Any]]:
    files = sorted((place / "kept").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_stages_say_what_was_dropped_and_changed(tmp_path: Path, data: Path) -> None:
    report = run(job_of(data), tmp_path / "run")
    kept = rows(tmp_path / "run")
    assert [row["id"] for row in kept] == [
        1000 * file + at for file in range(3) for at in range(100) if at not in {3, 4, 5, 7}
    ]
    assert report.measured["kept_share"] == len(kept) / 300
    changed = [row["text"] for row in kept if row["id"] % 1000 == 6]
    assert all(text.endswith("write to <EMAIL>") for text in changed)
    stages = {
        stage["name"]: stage for stage in json.loads((tmp_path / "run/stages.json").read_bytes())
    }
    assert list(stages) == ["gopher_quality", "length", "pii", "length 2"]
    assert [stage["rows"] for stage in stages.values()] == [300, 291, 288, 288]
    assert stages["gopher_quality"]["counts"] == {"too few words": 9}
    assert stages["gopher_quality"]["examples"][0] == ["short", "too few words"]
    assert stages["length"]["counts"] == {"too many characters": 3}
    assert stages["pii"]["counts"] == {"email": 3}
    before, after = stages["pii"]["examples"][0]
    assert "ann@example.com" in before
    assert after.startswith("changed to: ") and after.endswith("<EMAIL>")
    assert (tmp_path / "run/stages.svg").read_text().startswith("<svg")
    shown, *lines = CurateKind().results(report, tmp_path / "run")
    assert isinstance(shown, Table)
    assert shown.rows[0][:4] == ("gopher_quality", "300", "9", "3.0 %")
    assert any("stages.json" in str(line) for line in lines)


@pytest.mark.slow
@pytest.mark.multi
def test_a_pool_keeps_the_same(tmp_path: Path, data: Path) -> None:
    one = run(job_of(data), tmp_path / "one")
    many = run(job_of(data, pool=Choice(name="local"), workers=2), tmp_path / "many")
    assert rows(tmp_path / "one") == rows(tmp_path / "many")
    for before, after in zip(one.details["stages"], many.details["stages"], strict=True):
        assert {**before, "seconds": 0} == {**after, "seconds": 0}


def test_other_types_of_text_and_bad_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"body": GOOD.format(n)}) for n in range(50)]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"body": "\xff"}\n{"body"\n')
    options = {"columns": ("body",), "bad": "skip"}
    report = run(job_of(tmp_path / "a.jsonl", **options), tmp_path / "run")
    assert len(rows(tmp_path / "run")) == 50
    assert report.details["bad_rows"] == 2
    dictionary = pa.array([GOOD.format(1)] * 3, pa.large_string())
    pq.write_table(pa.table({"text": dictionary}), tmp_path / "b.parquet")
    run(job_of(tmp_path / "b.parquet"), tmp_path / "large")
    assert len(rows(tmp_path / "large")) == 3


def test_what_cannot_be_filtered(tmp_path: Path, data: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2], "body": ["a", "b"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"no column of text to filter; .* there are n, body"):
        run(job_of(tmp_path / "c.parquet"), tmp_path / "one")
    with pytest.raises(DataError, match="no column of text"):
        run(job_of(tmp_path / "c.parquet", columns=("n",)), tmp_path / "two")
    with pytest.raises(ConfigError, match="gopher_qualty"):
        job_of(data, ["gopher_qualty"])
    with pytest.raises(ConfigError, match="max_bullet_lines"):
        job_of(data, [{"name": "gopher_quality", "max_bullet_lines": 1.5}])
    with pytest.raises(ConfigError, match="no benchmark"):
        run(job_of(data, ["decontaminate"]), tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_plans_are_timed_on_the_rows_of_this_machine(data: Path) -> None:
    machine = load("laptop")
    described, *_ = CurateKind().plan(job_of(data), machine)
    assert "of one core of a server" in described.notes[0]
    here = machine.model_copy(
        update={"fingerprint": {**machine.fingerprint, "cpu": fingerprint()["cpu"]}}
    )
    timed, *_ = CurateKind().plan(job_of(data), here)
    assert "timed on some of the rows" in timed.notes[0]
    assert {
        str(plan.job.method) for plan in CurateKind().plan(CurateJob(data=str(data)), here)
    } == {
        "random",
        "filters",
    }


def test_change_over_seeds() -> None:
    result = change([1.1, 1.2, 1.3], [1.0, 1.0, 1.0])
    assert result.value == pytest.approx(0.2)
    assert result.high - result.value == pytest.approx(2.9199856 * 0.1 / 3**0.5)


@pytest.mark.slow
def test_the_effect_on_loss(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    draws = [f"{n * 7919 % 10007:x} {n * 104729 % 99991:x} " * 9 for n in range(600)]
    texts = [text for n, noise in enumerate(draws) for text in (GOOD.format(n % 50), noise)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet")
    settings = EffectSettings(tokens=40_960, seeds=2, heldout=0.05)
    report = run(
        job_of(tmp_path / "d.parquet", ["gopher_quality"], effect=settings), tmp_path / "run"
    )
    effect = report.details["effect"]
    assert all(len(seeds) == 2 for held in effect["losses"].values() for seeds in held.values())
    # Trained on prose alone it knows prose better.
    assert effect["change"]["kept rows"]["value"] < -0.02
    _, examples, effect, *_ = CurateKind().results(report, tmp_path / "run")
    assert isinstance(examples, Table) and "why" in examples.columns
    assert isinstance(effect, Table) and "trained on kept rows" in effect.columns
    assert CurateJob(data="x", effect=True).effect == EffectSettings()
    with pytest.raises(DataError, match="effect on loss needs"):
        run(
            job_of(
                tmp_path / "d.parquet", [{"name": "length", "min_chars": 10**6}], effect=settings
            ),
            tmp_path / "none",
        )
