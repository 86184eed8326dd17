"""Sources: every row once whatever the shards, bad rows named or counted, over many processes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from shard_work import counted, dies, full, of_process

from shoal.core.errors import DataError, RankError
from shoal.core.parts import Choice
from shoal.fields.data.readers import BadRowCount, FilePiece, line_blocks
from shoal.fields.data.shards import map_shards, opened
from shoal.fields.data.sources import open_source

ROWS = [{"id": at, "text": f"row {at} " + "é" * (at % 5)} for at in range(1000)]


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Rows in the format of the ending."""
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=64)
    elif path.suffix == ".arrow":
        feather.write_feather(table, path, compression="uncompressed", chunksize=100)
    elif path.suffix == ".csv":
        path.write_text("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv", "a.arrow"])
def test_shards_have_every_row_once(tmp_path: Path, name: str) -> None:
    source = open_source(str(written(tmp_path / name)))
    assert source.schema.names == ["id", "text"]
    shards = source.shards(2000)
    assert len(shards) > 1 or name.endswith((".gz", ".csv", ".arrow"))
    rows = [row for shard in shards for batch in shard.batches(100) for row in batch.to_pylist()]
    assert rows == ROWS
    assert max(batch.num_rows for batch in source.batches(100)) <= 100
    assert source.count() in (None, 1000)
    only = open_source(str(tmp_path / name), columns=["text"])
    assert next(only.batches()).schema.names == ["text"]


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), min_size=1),
    size=st.integers(1, 60),
    ends=st.booleans(),
)
def test_lines_are_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    data = b"\n".join(lines) + b"\n" * ends
    if not data:
        return
    path.write_bytes(data)
    pieces = [
        FilePiece(str(path), at, min(at + size, len(data))) for at in range(0, len(data), size)
    ]

    def fail(why: str, rows: int = 1) -> None:
        raise AssertionError(why)

    blocks = [block for piece in pieces for block in line_blocks(piece, fail)]
    assert b"".join(block for _, block in blocks) == data
    assert all(data[at : at + len(block)] == block for at, block in blocks)


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = [json.dumps(row).encode() for row in ROWS[:50]]
    bad = [b"{", b'{"id": 1, "text": "\xff"}', b'{"id": "x", "text": "y"}', b"[1]"]
    path.write_bytes(b"\n".join([*good, *bad, *good]) + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, byte \d+: not JSON.*bad=skip"):
        list(open_source(str(path)).batches())
    count = BadRowCount()
    rows = sum(b.num_rows for b in open_source(str(path), bad="skip").batches(bad=count))
    assert (rows, count.rows) == (100, 4)
    assert "not JSON" in count.first


def test_a_row_that_is_too_long_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.fields.data.readers.MAX_ROW", 4000)
    monkeypatch.setattr("shoal.fields.data.readers._BLOCK", 1000)
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in ROWS[:20]]
    path.write_text("\n".join([*lines, json.dumps({"id": 0, "text": "x" * 20_000}), *lines]))
    count = BadRowCount()
    rows = [
        row
        for batch in open_source(str(path), bad="skip").batches(bad=count)
        for row in batch.to_pylist()
    ]
    assert rows == [*ROWS[:20], *ROWS[:20]]
    assert count.rows == 1
    with pytest.raises(DataError, match="a row longer than"):
        list(open_source(str(path)).batches())


def test_parquet_that_is_damaged_or_changes(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet")
    whole = written(tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read"):
        list(open_source(str(tmp_path)).batches())
    written(tmp_path / "c.parquet", [{"id": "x", "text": "y"}])
    count = BadRowCount()
    batches = open_source(str(tmp_path), bad="skip").batches(bad=count)
    assert sum(batch.num_rows for batch in batches) == 1000
    assert count.rows == 2  # a file of unknown length, and a row
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(DataError, match="column 'id' is string, in the first file int64"):
        list(open_source(str(tmp_path)).batches())


def test_what_cannot_be_a_source(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column 'txt'; it has id, text"):
        open_source(str(tmp_path), columns=["txt"])
    written(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"several formats: .*pattern='\*\.parquet'"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="no such file"):
        open_source(str(tmp_path / "nothing"))


def test_text_of_lines_of_files_and_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"one\r\ntwo \xff\nthree")
    (batch,) = open_source(str(tmp_path / "a.log")).batches()
    assert batch.column(0).to_pylist() == ["one", "two \ufffd", "three"]
    (tmp_path / "a.log").unlink()
    (tmp_path / "a.md").write_text("# a")
    (tmp_path / "b.md").write_text("# b")
    rows = [row for batch in open_source(str(tmp_path)).batches() for row in batch.to_pylist()]
    assert rows == [{"name": "a.md", "text": "# a"}, {"name": "b.md", "text": "# b"}]
    modules = [name for b in open_source("stdlib").batches() for name in b.column(0).to_pylist()]
    assert len(set(modules)) == len(modules) > 100


@pytest.mark.slow
@pytest.mark.multi
def test_a_shard_whose_worker_is_killed_is_done_once(tmp_path: Path) -> None:
    source = open_source(str(written(tmp_path / "a.parquet")))
    shards, pool = source.shards(1000), Choice(name="local", options={"workers": 2})
    place = tmp_path / "done"
    results = map_shards(counted, shards, place, pool=pool, workers=2, shared=tmp_path / "died")
    assert sum(result["rows"] for result in results) == 1000
    assert sum(result["ids"] for result in results) == sum(range(1000))
    assert (tmp_path / "died").exists()
    calls = {path.name: path.read_text() for path in place.glob("*.calls")}
    assert set(calls.values()) == {"x"}
    assert len(calls) == len(shards)
    # What is done is not done again.
    (place / ".000001.json").unlink()
    again = map_shards(counted, shards, place, shared=tmp_path / "died")
    assert again == results
    assert sorted(path.read_text() for path in place.glob("*.calls"))[-1] == "xx"
    assert sum(len(path.read_text()) for path in place.glob("*.calls")) == len(shards) + 1
    with pytest.raises(RankError):
        map_shards(dies, shards[:1], tmp_path / "dies", pool=pool, workers=2)


def test_processes_start_once_for_several_passes(tmp_path: Path) -> None:
    shards = open_source(str(written(tmp_path / "a.parquet"))).shards(1000)
    processes: set[int] = set()
    with opened(Choice(name="local", options={"workers": 1})) as pool:
        for name in ("one", "two"):
            results = map_shards(of_process, shards, tmp_path / name, pool=pool)
            processes |= {result["process"] for result in results}
    assert len(processes) == 1
    assert processes != {os.getpid()}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    shards = open_source(str(written(tmp_path / "a.parquet"))).shards()
    with pytest.raises(DataError, match=r"done: no space left.*--resume"):
        map_shards(full, shards, tmp_path / "done")


def test_tables_of_this_machine_and_arrays(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("sklearn")
    digits = open_source("digits")
    rows = list(digits.batches())
    assert sum(batch.num_rows for batch in rows) == digits.count() == 1797
    assert len(rows[0]["vector"][0]) == 64
    assert {one.as_py() for one in rows[0]["label"]} == set(range(10))
    photos = open_source("photos:50", columns=["vector"])
    assert [batch.num_rows for batch in photos.batches()] == [photos.count()] == [50]
    X = np.arange(12, dtype=np.float32).reshape(4, 3)
    for name, array in (("a", X), ("b", np.asfortranarray(X))):
        np.save(tmp_path / f"{name}.npy", array)
    both = open_source(str(tmp_path))
    assert both.count() == 8
    got = [row["vector"] for batch in both.batches() for row in batch.to_pylist()]
    assert got == X.tolist() * 2
    np.save(tmp_path / "c.npy", X[:, :2])
    with pytest.raises(DataError, match="2 columns, in the first file 3"):
        list(open_source(str(tmp_path)).batches())
    (tmp_path / "bad.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-8])
    with pytest.raises(DataError, match="cannot be read"):
        list(open_source(str(tmp_path / "bad.npy")).batches())
    np.save(tmp_path / "object.npy", np.array([["a"]]))
    with pytest.raises(DataError, match="expected numbers"):
        open_source(str(tmp_path / "object.npy"))
