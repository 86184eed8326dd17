from __future__ import annotations

import gzip
import io
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.corpora.files import from_path
from shoal.corpora.text import TextCorpus, pieces


def test_a_directory_is_a_document_a_file(stories: Path) -> None:
    (stories / ".hidden").write_bytes(b"\0")
    corpus = TextCorpus(path=str(stories), pattern="*.txt", heldout_every=5)
    result = list(corpus.documents())
    assert [d.name for d in result] == sorted(
        p.relative_to(stories).as_posix() for p in stories.rglob("*.txt")
    )
    assert all((stories / d.name).read_text() == d.text for d in result)
    parts = [d for s in ("train", "heldout") for d in corpus.documents(s)]  # type: ignore[arg-type]
    assert sorted(parts) == result
    assert corpus.num_bytes() == sum(p.stat().st_size for p in stories.rglob("*.txt"))


def test_the_split_does_not_depend_on_where_the_directory_is(stories: Path) -> None:
    before = {d.name: d.split for d in TextCorpus(path=str(stories)).documents()}
    moved = stories.rename(stories.with_name("elsewhere"))
    assert {d.name: d.split for d in TextCorpus(path=str(moved)).documents()} == before


def test_a_single_file_is_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {n}, of a few words.\nSecond line.\n\n" for n in range(2000))
    (tmp_path / "book.txt").write_text(text)
    result = list(TextCorpus(path=str(tmp_path / "book.txt")).documents())
    assert "".join(d.text for d in result) == text
    assert len(result) > 100
    assert all(d.text.endswith("\n\n") for d in result)
    assert {d.split for d in result} == {"train", "heldout"}
    assert result[3].name == "book.txt#3"


@given(
    st.text(alphabet=st.sampled_from("ab \n\rä€😀"), max_size=400),
    st.integers(1, 20),
)
def test_pieces_join_to_the_text(text: str, target: int) -> None:
    result = list(pieces(io.BytesIO(text.encode()), "t", target))
    assert "".join(result) == text
    assert all(result)


def test_pieces_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("äöü wort " * 30 + "\n\n") * 20
    whole = list(pieces(io.BytesIO(text.encode()), "t", 50))
    monkeypatch.setattr("shoal.corpora.text.BLOCK", 7)
    assert list(pieces(io.BytesIO(text.encode()), "t", 50)) == whole


def test_other_stores_and_compression(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/corpus/a.txt", b"first")
    store.pipe("/corpus/b.txt", b"second")
    corpus = TextCorpus(path="memory://corpus")
    assert [(d.name, d.text) for d in corpus.documents()] == [
        ("a.txt", "first"),
        ("b.txt", "second"),
    ]
    mark = corpus.fingerprint()
    store.pipe("/corpus/b.txt", b"other!")
    assert corpus.fingerprint() != mark
    store.rm("/corpus", recursive=True)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed text"))
    assert [d.text for d in TextCorpus(path=str(tmp_path)).documents()] == ["packed text"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed text")[:-9])
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        list(TextCorpus(path=str(tmp_path)).documents())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty; give a file with text"),
        (b"good text\n" * 200_000 + b"\0ELF", "byte 2000000 is NUL.* binary file; give text"),
        (b"good text\n\xff\xfe", "byte 10 is not UTF-8"),
        ("cut short ä".encode()[:-1], "byte 10 is not UTF-8"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        list(TextCorpus(path=str(file)).documents())
    assert str(file) in str(caught.value)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path = '.*nowhere': no such file or directory"):
        list(TextCorpus(path=str(tmp_path / "nowhere")).documents())
    with pytest.raises(DataError, match=r"no file matches '\*' among 0"):
        list(TextCorpus(path=str(tmp_path)).documents())
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match="all 2 files are empty"):
        list(TextCorpus(path=str(tmp_path)).documents())
    with pytest.raises(DataError, match=r"no file matches '\*\.md' among 2"):
        list(TextCorpus(path=str(tmp_path), pattern="*.md").documents())
    with pytest.raises(DataError, match=r"cannot be opened .*nosuch"):
        list(TextCorpus(path="nosuch://bucket/key").documents())
    with pytest.raises(ConfigError):
        TextCorpus(path="")


def test_the_corpus_of_a_path(tmp_path: Path) -> None:
    for name, corpus in {"a.txt": "text", "b.jsonl.gz": "jsonl", "c.parquet": "parquet"}.items():
        (tmp_path / name).write_bytes(b"x")
        assert from_path(str(tmp_path / name)).name == corpus
    assert from_path(str(tmp_path)).name == "text"
