"""Containers of logs: the same bytes come back, damage is noticed, and they are small."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import DataError
from shoal.fields.data.logs import pack, unpack
from shoal.fields.data.logs.formats import FORMATS, PLAIN
from shoal.fields.data.logs.packed.columns import StreamReader, StreamWriter
from shoal.fields.data.logs.packed.container import packed_block, unpacked_block, unpacked_bytes

PIECES = [
    b"\n",
    b"\r\n",
    b"\r",
    b" ",
    b"  ",
    b"x",
    b"<*>",
    b"7",
    b"007",
    b"10:20:30",
    b"\xff\xfe",
    b"081109 203615 148 INFO dfs.A: got block blk_-17 of size 99\n",
    b"12345678901234567890123",
    b"Jun 14 15:16:01 combo sshd(pam_unix)[19939]: failure; uid=0\r\n",
    b"\t",
    b"",
]
TEXTS = st.binary(max_size=80) | st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


@given(text=TEXTS, name=st.sampled_from(["HDFS", "Linux", "Windows", "Zookeeper", "plain"]))
@settings(max_examples=250, deadline=None)
def test_the_same_bytes_come_back(text: bytes, name: str) -> None:
    assert unpacked_block(packed_block(text, FORMATS[name])) == text


@given(
    values=st.lists(
        st.sampled_from(
            [
                b"",
                b"0",
                b"00",
                b"5",
                b"10:20:30",
                b"10:20:31",
                b"a7",
                b"a8",
                b"99999999999999999999",
                b"a\0b1",
                b"\n",
            ]
        ),
        max_size=20,
    )
)
@settings(max_examples=200, deadline=None)
def test_columns_of_texts(values: list[bytes]) -> None:
    out = StreamWriter()
    out.texts(values)
    out.ints(np.array([len(values)], np.int64))
    streams = StreamReader(out.packed())
    assert streams.texts(len(values)) == values
    assert streams.ints(1).tolist() == [len(values)]


@given(
    values=st.lists(st.integers(-(2**60), 2**60), max_size=20)
    | st.lists(st.integers(0, 300), max_size=900)
)
@settings(max_examples=100, deadline=None)
def test_columns_of_numbers(values: list[int]) -> None:
    out = StreamWriter()
    out.ints(np.array(values, np.int64))
    assert StreamReader(out.packed()).ints(len(values)).tolist() == values


def a_log(lines: int = 3000) -> bytes:
    draw = np.random.default_rng(0)
    rows = draw.integers(0, 10**6, (lines, 3)).tolist()
    texts = ("got {} of {} bytes from 10.0.0.{}", "request {} took {} ms in {} steps")
    return "".join(
        f"2024-01-01 10:{at // 60 % 60:02}:{at % 60:02} INFO: {texts[at % 2].format(*row)}\n"
        for at, row in enumerate(rows)
    ).encode()


def test_a_file_and_its_compressed_form(tmp_path: Path) -> None:
    text = a_log()
    for name, data in (("a.log", text), ("b.txt.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(data)
        size = pack(tmp_path / name, tmp_path / "packed")
        assert size == (tmp_path / "packed").stat().st_size
        assert size < 0.2 * len(text)
        assert unpacked_bytes(tmp_path / "packed") == len(text)
        assert unpack(tmp_path / "packed", tmp_path / "back") == len(text)
        assert (tmp_path / "back").read_bytes() == text


def test_damage_is_noticed_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(a_log(300))
    pack(tmp_path / "a.log", tmp_path / "packed")
    whole = (tmp_path / "packed").read_bytes()
    for at in (0, 9, 20, len(whole) // 2, len(whole) - 5):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (tmp_path / "bad").write_bytes(bytes(damaged))
        with pytest.raises(DataError):
            unpack(tmp_path / "bad", tmp_path / "back")
        assert not (tmp_path / "back").exists()
    (tmp_path / "short").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError):
        unpack(tmp_path / "short", tmp_path / "back")
    with pytest.raises(DataError, match="no container"):
        unpack(tmp_path / "a.log", tmp_path / "back")


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"\0\1\2\n" * 100)
    with pytest.raises(DataError, match="binary, not a log"):
        pack(tmp_path / "a.log", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    assert PLAIN.program.fields == ("Content",)
