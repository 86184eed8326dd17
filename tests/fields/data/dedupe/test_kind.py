"""The job ``dedupe``: what is kept is right by brute force, whatever shards, pool and memory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from keys_that_kill import dying
from typer.testing import CliRunner

from own_home import own_home
from shoal.app.cli import app
from shoal.core.errors import ConfigError, DataError, PlanError, ShoalError
from shoal.core.parts import Choice
from shoal.cost.score import Score
from shoal.fields.data.dedupe import passes
from shoal.fields.data.dedupe.costs import rates_of, timed
from shoal.fields.data.dedupe.job import DedupeJob
from shoal.fields.data.dedupe.kind import DedupeKind
from shoal.fields.data.minhash import MinHasher, optimal_bands
from shoal.ir import Machine
from shoal.machine import load

WORDS = [f"word{at}" for at in range(400)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def documents(count: int = 300, seed: int = 0) -> list[str]:
    """Some are copies of others, with another case, or with some words changed."""
    draw = np.random.default_rng(seed)
    texts: list[str] = []
    while len(texts) < count:
        way = draw.integers(5)
        base = texts[draw.integers(len(texts))] if texts else ""
        if way == 0 and base:
            texts.append(f"  {base.upper()}!\n")
        elif way == 1 and base:
            words = base.split()
            words[draw.integers(len(words))] = str(draw.choice(WORDS))
            texts.append(" ".join(words))
        else:
            texts.append(" ".join(draw.choice(WORDS, draw.integers(20, 60))))
    return texts


@pytest.fixture
def data(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir()
    texts = documents()
    for file in range(3):
        some = texts[100 * file : 100 * file + 100]
        rows = pa.table({"id": pa.array(range(100 * file, 100 * file + 100)), "text": some})
        pq.write_table(rows, place / f"{file}.parquet", row_group_size=25)
    return place


def run(tmp_path: Path, name: str = "run", **options: Any) -> Any:
    kind = DedupeKind()
    job = DedupeJob(**options)
    return kind.run(kind.plan(job, load("laptop"))[0], tmp_path / name)


def clusters(directory: Path) -> list[int]:
    table = pq.read_table(directory / "clusters.parquet")
    assert table.column("row").to_pylist() == list(range(table.num_rows))
    root: list[int] = table.column("cluster").to_pylist()
    assert table.column("kept").to_pylist() == [at == row for row, at in enumerate(root)]
    return root


def kept(directory: Path, column: str = "id") -> list[Any]:
    files = sorted((directory / "kept").glob("*.parquet"))
    return [x for file in files for x in pq.read_table(file).column(column).to_pylist()]


def words(text: str) -> list[str]:
    return [word for word in re.split(r"\W+", text.lower()) if word]


def joined(n: int, pairs: list[tuple[int, int]]) -> list[int]:
    root = list(range(n))
    for _ in range(n):
        before = list(root)
        for a, b in pairs:
            root[a] = root[b] = min(root[a], root[b])
        if root == before:
            break
    return root


def sharing_a_band(texts: list[str], threshold: float, num_perm: int = 128) -> list[int]:
    """Clusters from all pairs of signatures."""
    signatures, count = MinHasher(num_perm, seed=1).signatures(texts)
    b, r = optimal_bands(threshold, num_perm)
    bands = signatures[:, : b * r].reshape(len(texts), b, r)
    pairs = [
        (i, j)
        for i in range(len(texts))
        for j in range(i)
        if count[i] and count[j] and (bands[i] == bands[j]).all(axis=1).any()
    ]
    return joined(len(texts), pairs)


def jaccard(one: str, other: str, n: int = 5) -> float:
    a, b = (
        {tuple(w[at : at + n]) for at in range(len(w) - n + 1)} for w in map(words, (one, other))
    )
    return len(a & b) / max(len(a | b), 1)


# ---------------------------------------------------------------------------- results


def test_minhash_as_by_all_pairs(tmp_path: Path, data: Path) -> None:
    texts = documents()
    report = run(tmp_path, data=str(data), threshold=0.7, method="minhash")
    expected = sharing_a_band(texts, 0.7)
    assert clusters(tmp_path / "run") == expected
    own = [row for row, at in enumerate(expected) if row == at]
    assert 40 < len(own) < 290
    assert kept(tmp_path / "run") == own
    assert report.details["kept"] == len(own)
    assert report.measured["kept_share"] == len(own) / 300
    assert sum(size * count for size, count in report.details["sizes"]) - report.details[
        "clusters"
    ] == 300 - len(own)
    for one, other, why in report.details["examples"]:
        rows = [int(x) for x in re.findall(r"\d+", why)]
        assert one == texts[rows[0]][:300]
        assert other == texts[rows[1]][:300]
    assert not (tmp_path / "run" / "keys").exists()
    assert (tmp_path / "run" / "clusters.svg").read_text().startswith("<svg")
    assert {row.name for row in Score().rows()} == {"dedupe"}
    assert {"total_s", "bytes_per_s", "memory_bytes"} <= set(report.errors)


@pytest.mark.slow
def test_verified_pairs_are_similar(tmp_path: Path, data: Path) -> None:
    texts = documents()
    choice = Choice(name="minhash", options={"verify": True, "bands": 32, "rows": 4})
    report = run(tmp_path, data=str(data), threshold=0.6, method=choice)
    pairs = [(i, j) for i in range(300) for j in range(i) if jaccard(texts[i], texts[j]) >= 0.6]
    # 32 bands of 4 miss a pair of 0.6 once in a hundred times: none here.
    assert clusters(tmp_path / "run") == joined(300, pairs)
    assert 0 < report.measured["compared_pairs"] < 300 * 299 / 2
    assert report.details["bands"] == 32


def test_exact(tmp_path: Path, data: Path) -> None:
    run(tmp_path, data=str(data), method="exact")
    seen: dict[tuple[str, ...], int] = {}
    expected = [seen.setdefault(tuple(words(text)), at) for at, text in enumerate(documents())]
    assert clusters(tmp_path / "run") == expected
    assert len(set(expected)) < 300


def test_neither_memory_nor_shards_matter(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, data=str(data), method="minhash")
    expected = clusters(tmp_path / "run")
    monkeypatch.setattr("shoal.fields.data.sources.SHARD_BYTES", 1000)
    monkeypatch.setattr("shoal.fields.data.minhash.lsh._ROW_BYTES", 40_000)
    choice = Choice(name="minhash", options={"memory_mb": 1})
    run(tmp_path, "small", data=str(data), method=choice)
    assert clusters(tmp_path / "small") == expected
    (tmp_path / "one").mkdir()
    whole = pa.concat_tables([pq.read_table(data / f"{at}.parquet") for at in range(3)])
    pq.write_table(whole, tmp_path / "one" / "all.parquet")
    run(tmp_path, "whole", data=str(tmp_path / "one"), method="minhash")
    assert clusters(tmp_path / "whole") == expected


def test_texts_of_several_columns(tmp_path: Path) -> None:
    rows = pa.table({"a": ["x", "x", None], "b": ["y", "z", "x y"], "n": [1, 2, 3]})
    pq.write_table(rows, tmp_path / "t.parquet")
    where = str(tmp_path / "t.parquet")
    run(tmp_path, data=where, columns=("a", "b"), method="exact")
    assert clusters(tmp_path / "run") == [0, 1, 0]
    with pytest.raises(DataError, match=r"columns of text: a, b; name those"):
        run(tmp_path, "other", data=where)
    with pytest.raises(DataError, match=r"column 'n' is int64, not text; columns of text: a, b"):
        run(tmp_path, "other", data=where, columns=("n",))
    pq.write_table(rows.select(["n"]), tmp_path / "n.parquet")
    with pytest.raises(DataError, match="no column of text"):
        run(tmp_path, "other", data=str(tmp_path / "n.parquet"))


# ---------------------------------------------------------------------------- hostile data


def test_empty_documents_and_thousands_of_equal_ones(tmp_path: Path) -> None:
    texts = [""] * 50 + ["the same words again and again, always the same"] * 5000 + [" . "]
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet")
    where = str(tmp_path / "t.parquet")
    for verify in (False, True):
        name, choice = f"v{verify}", Choice(name="minhash", options={"verify": verify})
        report = run(tmp_path, name, data=where, method=choice)
        assert report.details["kept"] == 52
        assert report.details["empty"] == 51
        assert report.details["sizes"] == [[5000, 1]]
    assert run(tmp_path, "exact", data=where, method="exact").details["kept"] == 2


def test_nothing_but_empty_documents(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["", ""]}), tmp_path / "t.parquet")
    for verify in (False, True):
        choice = Choice(name="minhash", options={"verify": verify})
        report = run(tmp_path, f"v{verify}", data=str(tmp_path / "t.parquet"), method=choice)
        assert report.details["kept"] == 2


def test_a_table_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "t.parquet")
    for method in ("minhash", "exact"):
        report = run(tmp_path, method, data=str(tmp_path / "t.parquet"), method=method)
        assert report.details["kept"] == 0
        assert pq.read_table(tmp_path / method / "clusters.parquet").num_rows == 0


def test_bad_rows_are_refused_or_counted(tmp_path: Path, data: Path) -> None:
    lines = [json.dumps({"text": text}).encode() for text in documents(40)]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join([*lines, b'{"text": "\xff"}', b"{", *lines]))
    with pytest.raises(DataError, match=r"t\.jsonl, byte \d+: not"):
        run(tmp_path, data=str(tmp_path / "t.jsonl"), method="minhash")
    options = {"data": str(tmp_path / "t.jsonl"), "bad": "skip", "method": "minhash"}
    report = run(tmp_path, "skip", **options)
    assert report.details["bad_rows"] == 2
    assert clusters(tmp_path / "skip")[40:] == clusters(tmp_path / "skip")[:40]
    whole = (data / "1.parquet").read_bytes()
    (data / "1.parquet").write_bytes(whole[:-50])
    with pytest.raises(DataError, match=r"1\.parquet: cannot be read"):
        run(tmp_path, "cut", data=str(data), method="minhash")


def test_data_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": text}) for text in documents(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    honest = passes.kept_rows

    def later(*given: Any) -> Any:
        (tmp_path / "t.jsonl").write_text("\n".join(lines[:20]))
        return honest(*given)

    monkeypatch.setattr("shoal.fields.data.dedupe.minhash_lsh.kept_rows", later)
    with pytest.raises(DataError, match="has changed while it was read"):
        run(tmp_path, data=str(tmp_path / "t.jsonl"), method="minhash")


def test_a_full_disk(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(passes.np, "save", full)
    with pytest.raises(ShoalError, match="No space left"):
        run(tmp_path, data=str(data), method="minhash")
    assert not list((tmp_path / "run").rglob("*.npy"))
    monkeypatch.undo()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    kind = DedupeKind()
    plan = kind.plan(DedupeJob(data=str(data), method=Choice(name="minhash")), load("laptop"))[0]
    report = kind.run(plan, tmp_path / "run", resume=True)
    assert report.details["kept"] == len(set(sharing_a_band(documents(), 0.8)))


def test_a_stopped_run_goes_on(tmp_path: Path, data: Path) -> None:
    kind = DedupeKind()
    job = DedupeJob(data=str(data), method=Choice(name="minhash"), threshold=0.7)
    plan = kind.plan(job, load("laptop"))[0]

    def stop(event: dict[str, Any]) -> None:
        if "keys of shard 2" in str(event.get("state")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kind.run(plan, tmp_path / "run", watch=stop)
    first = (tmp_path / "run" / "keys" / "000000.keys.npy").stat().st_mtime_ns
    seen: list[int] = []

    def look(event: dict[str, Any]) -> None:
        if "keys of shard 3" in str(event.get("state")):
            seen.append((tmp_path / "run" / "keys" / "000000.keys.npy").stat().st_mtime_ns)

    kind.run(plan, tmp_path / "run", resume=True, watch=look)
    assert seen == [first]
    assert clusters(tmp_path / "run") == sharing_a_band(documents(), 0.7)


@pytest.mark.slow
@pytest.mark.multi
def test_a_killed_worker(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shard is done by another, once, and no row is twice in what is kept."""
    honest = passes.row_keys

    def deadly(problem: Any, function: Any, shared: Any, *, until: float) -> Any:
        return honest(problem, dying, (tmp_path / "died", shared), until=until)

    monkeypatch.setattr("shoal.fields.data.dedupe.minhash_lsh.row_keys", deadly)
    pool = Choice(name="local", options={"workers": 2})
    run(tmp_path, data=str(data), method="minhash", pool=pool, workers=2, threshold=0.7)
    assert (tmp_path / "died").exists()
    # A batch for each row group: those of the shard that died are done once more at most.
    assert len((tmp_path / "calls").read_text()) <= 12 + 4
    assert clusters(tmp_path / "run") == sharing_a_band(documents(), 0.7)
    assert len(set(kept(tmp_path / "run"))) == len(kept(tmp_path / "run"))


# ---------------------------------------------------------------------------- plans


def names(job: DedupeJob, machine: Machine) -> list[str]:
    plans = DedupeKind().plan(job, machine)
    return [plan.job.method.name for plan in plans if plan.job.method is not None]


def test_the_threshold_decides(data: Path) -> None:
    assert names(DedupeJob(data=str(data)), load("laptop")) == ["minhash", "exact"]
    assert names(DedupeJob(data=str(data), threshold=1.0), load("laptop")) == ["exact"]
    assert names(DedupeJob(data=str(data), compared="tables"), load("laptop")) == ["containment"]
    plan = DedupeKind().plan(DedupeJob(data=str(data)), load("laptop"))[0]
    assert plan.rows == 300
    assert 0.3 < plan.predicted["finds"].value < 1


def test_more_rows_cost_more(data: Path) -> None:
    small = DedupeKind().plan(DedupeJob(data=str(data)), load("laptop"))[0]
    large = DedupeKind().plan(DedupeJob(data="stdlib"), load("laptop"))[0]
    assert large.predicted["total_s"].value > 10 * small.predicted["total_s"].value


def test_rates_are_timed_once_here_and_derived_elsewhere() -> None:
    rates = timed(200)
    assert rates.measured
    assert min(rates.shingles, rates.slots, rates.digest, rates.sort) > 0
    assert not rates_of(load("laptop")).measured


def test_what_cannot_be_planned(data: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    shutil.copy(data / "0.parquet", tmp_path / "one")
    with pytest.raises(PlanError, match="no method compares tables"):
        names(DedupeJob(data=str(tmp_path / "one"), compared="tables"), load("laptop"))
    choice = Choice(name="minhash", options={"bands": 40, "rows": 4})
    with pytest.raises(ConfigError, match="bands times rows at most num_perm = 128"):
        names(DedupeJob(data=str(data), method=choice), load("laptop"))
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": 1e6})
    device = machine.device.model_copy(update={"memory": (tier,)})
    with pytest.raises(PlanError, match="no method fits"):
        names(DedupeJob(data=str(data)), machine.model_copy(update={"device": device}))


# ---------------------------------------------------------------------------- tables


def test_tables_that_others_contain(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    place = tmp_path / "lake"
    place.mkdir()
    whole = pa.table({"x": range(5000), "y": [f"value {at}" for at in range(5000)]})
    pq.write_table(whole, place / "all.parquet")
    pq.write_table(whole.slice(100, 50), place / "some.parquet")
    pq.write_table(whole.select(["y"]), place / "column.parquet")
    changed = whole.slice(0, 50).set_column(1, "y", pa.array(["value 9"] * 50))
    pq.write_table(changed, place / "changed.parquet")
    (place / "damaged.parquet").write_bytes(b"PAR1")
    options = {"accesses": 0.0, "verify": "full"}
    report = run(tmp_path, data=str(place), method=Choice(name="containment", options=options))
    assert (report.details["kept"], report.measured["rows"]) == (2, 4.0)
    assert "damaged.parquet" in report.details["first_bad"]
    rows = pq.read_table(tmp_path / "run" / "clusters.parquet").to_pylist()
    assert {row["table"]: row["cluster"] for row in rows if not row["kept"]} == {
        "some.parquet": "all.parquet",
        "column.parquet": "all.parquet",
    }
    said = json.loads((tmp_path / "run" / "retention.json").read_text())
    recipe = next(one for one in said["recipes"] if one["table"] == "some.parquet")
    ids = pq.read_table(tmp_path / "run" / recipe["rows"]).column("row").to_pylist()
    assert ids == list(range(100, 150))
    assert said["usd_a_month"] < said["usd_a_month_if_all_are_kept"]
    assert "Nothing has been deleted" in (tmp_path / "run" / "lake.html").read_text()
    assert len(list(place.iterdir())) == 5
    tables = DedupeKind().results(report, tmp_path / "run")
    assert any("lake.html" in str(one) for one in tables)
    with pytest.raises(DataError, match="a directory of this machine"):
        run(tmp_path, "other", data="stdlib", method="containment")


@pytest.mark.slow
def test_the_command_line(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(data), "--threshold", "0.7", "-m", "laptop"]
    planned = CliRunner().invoke(app, ["plan", "dedupe", *words, "--out", "plan.yaml"])
    assert planned.exit_code == 0, planned.output
    assert "minhash" in planned.output
    run_ = ["run", "dedupe", "--plan", "plan.yaml", "--dir", "out", "-m", "laptop", "-q"]
    done = CliRunner().invoke(app, run_)
    assert done.exit_code == 0, done.output
    for text in ("prediction and measurement", "clusters.parquet", "duplicates side by side"):
        assert text in done.output
