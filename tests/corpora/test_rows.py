"""JSON Lines and Parquet."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import DataError
from shoal.corpora.jsonl import JsonlCorpus
from shoal.corpora.parquet import Parquet
from shoal.corpora.protocols import Corpus, is_heldout


def _check_split(corpus: Corpus) -> None:
    both = list(corpus.documents())
    train = list(corpus.documents("train"))
    heldout = list(corpus.documents("heldout"))
    assert [d for d in both if d.split == "train"] == train
    assert [d for d in both if d.split == "heldout"] == heldout
    assert all(is_heldout(d.name) == (d.split == "heldout") for d in both)
    assert train and heldout


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"body": f"row {n} ä", "key": f"k{n}"}) for n in range(100)]
    file.write_text("\n\n".join(lines))
    plain = JsonlCorpus(path=str(file), field="body")
    assert [d.text for d in plain.documents()] == [f"row {n} ä" for n in range(100)]
    assert next(plain.documents()).name == "rows.jsonl#0"
    _check_split(plain)
    named = JsonlCorpus(path=str(tmp_path), field="body", id_field="key")
    assert [d.name for d in named.documents()] == [f"k{n}" for n in range(100)]
    before = {d.name: d.split for d in named.documents()}
    file.write_text("\n".join(reversed(lines)))
    assert {d.name: d.split for d in named.documents()} == before


def test_jsonl_half_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    assert [d.text for d in JsonlCorpus(path=str(file)).documents()] == ["a\ufffdb 😀"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": 1}', "line 2: 'text' is int, not text"),
        (b'{"txt": "a"}', "line 2: no key 'text'; it has 'txt'"),
        (b'{"text": "a"', "line 2: not JSON"),
        (b'["a"]', "line 2: list, not an object"),
        (b'{"text": "\xff"}', "line 2: byte 10 of the line is not UTF-8"),
        (b"\0\0\0", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=words) as caught:
        list(JsonlCorpus(path=str(file)).documents())
    assert str(file) in str(caught.value)


def test_a_line_without_its_id_or_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "fine"}\n')
    with pytest.raises(DataError, match="'id' is NoneType"):
        list(JsonlCorpus(path=str(file), id_field="id").documents())
    monkeypatch.setattr("shoal.corpora.jsonl.MAX_LINE", 8)
    with pytest.raises(DataError, match="line 1: longer than"):
        list(JsonlCorpus(path=str(file)).documents())


def test_parquet(tmp_path: Path) -> None:
    texts = [None if n == 5 else f"row {n} ä" for n in range(3000)]
    table = pa.table({"body": texts, "key": [f"k{n}" for n in range(3000)], "n": range(3000)})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    plain = Parquet(path=str(tmp_path), column="body")
    assert [d.text for d in plain.documents()] == [text for text in texts if text is not None]
    assert [d.name for d in plain.documents()][4:6] == ["rows.parquet#4", "rows.parquet#6"]
    assert len({d.name for d in plain.documents()}) == 2999
    _check_split(plain)
    named = Parquet(path=str(tmp_path / "rows.parquet"), column="body", id_column="key")
    assert next(named.documents()).name == "k0"
    _check_split(named)


def test_bad_parquet(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"body": ["a"] * 2000, "n": range(2000)}), file)
    with pytest.raises(DataError, match=r"no column 'text'; it has body, n; .*data.column"):
        list(Parquet(path=str(file)).documents())
    with pytest.raises(DataError, match="column 'n' holds int64, not text"):
        list(Parquet(path=str(file), column="n").documents())
    with pytest.raises(DataError, match=r"no column 'id'.*data\.id_column"):
        list(Parquet(path=str(file), column="body", id_column="id").documents())
    whole = file.read_bytes()
    for broken in (whole[:-20], b"this is no parquet file at all", whole[:4] + b"\xff" * 40):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"rows\.parquet: not a readable Parquet file"):
            list(Parquet(path=str(file), column="body").documents())
    file.write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty"):
        list(Parquet(path=str(file), column="body").documents())
