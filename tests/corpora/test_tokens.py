from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice
from shoal.corpora import CORPORA
from shoal.corpora.jsonl import JsonlCorpus
from shoal.corpora.tokens import TokenSet, open_tokens, prepare


def _listing(path: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in path.iterdir()}


def test_all_text_comes_back(small: TokenSet) -> None:
    corpus: JsonlCorpus = CORPORA.build({"name": "jsonl", "path": str(small.path.parents[1])})
    tokenizer = small.tokenizer()
    for split in (small.train, small.heldout):
        texts = [d.text for d in corpus.documents(split.name)]
        assert split.num_documents == len(texts)
        assert split.bytes_per_document.tolist() == [len(text.encode()) for text in texts]
        assert split.text_bytes == sum(split.bytes_per_document)
        assert len(split) == split.offsets[-1]
        for number, text in enumerate(texts):
            ids = split.document(number)
            assert ids[-1] == small.end_of_text
            assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text
    held = [raw.decode() for raw in small.heldout_texts()]
    assert held == [d.text for d in corpus.documents("heldout")]
    assert len([p for p in small.path.iterdir() if p.name.startswith("train-")]) > 5


def test_reading_is_a_ring_over_shards(small: TokenSet) -> None:
    split = small.train
    everything = np.concatenate([split.document(n) for n in range(split.num_documents)])
    rng = np.random.default_rng(0)
    for start, length in rng.integers(0, len(split), (50, 2)):
        out = np.empty(length, dtype=np.int64)
        split.read(int(start), out)
        assert (out == np.roll(everything, -start)[:length]).all()


def test_the_cache_is_used_and_follows_the_data(stories: Path, tmp_path: Path) -> None:
    data = Choice(name="text", options={"path": str(stories)})
    calls: list[tuple[int, int, str]] = []
    first = prepare(data, vocab_size=300, cache=tmp_path / "c", progress=lambda *a: calls.append(a))
    assert calls[-1][0] == calls[-1][1] == sum(p.stat().st_size for p in stories.rglob("*.txt"))
    before = _listing(first.path)
    again = prepare(
        data, vocab_size=300, cache=tmp_path / "c", progress=lambda *_: pytest.fail("worked again")
    )
    assert again.path == first.path and _listing(first.path) == before
    assert prepare(data, vocab_size=301, cache=tmp_path / "c").path != first.path
    next(stories.rglob("*.txt")).write_text("Something else.")
    assert prepare(data, vocab_size=300, cache=tmp_path / "c").path != first.path


def test_a_loaded_tokenizer(small: TokenSet, tmp_path: Path, stories: Path) -> None:
    data = {"name": "text", "path": str(stories)}
    tokens = prepare(data, str(small.tokenizer_path), 50_000, cache=tmp_path / "c")
    assert tokens.vocab_size == small.vocab_size
    assert prepare(data, str(small.tokenizer_path), 400, cache=tmp_path / "c").path == tokens.path
    with pytest.raises(ConfigError, match=r"vocabulary = 320: expected at most .* = 300"):
        prepare(data, str(small.tokenizer_path), 300, cache=tmp_path / "c")
    with pytest.raises(ConfigError, match="320 ids, the model's vocab_size is 300"):
        open_tokens(tokens.path, vocab_size=300)
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare(data, str(tmp_path / "none.json"), cache=tmp_path / "c")
    with pytest.raises(ConfigError, match="vocab_size = 100: expected 257"):
        prepare(data, "bpe", 100, cache=tmp_path / "c")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "index", "lie", "escape"])
def test_a_damaged_cache_is_told_and_rebuilt(stories: Path, tmp_path: Path, damage: str) -> None:
    data = {"name": "text", "path": str(stories)}
    tokens = prepare(data, vocab_size=300, cache=tmp_path / "c")
    good = {p.name: p.read_bytes() for p in tokens.path.iterdir()}
    shard, index = tokens.path / "train-00000.bin", tokens.path / "index.json"
    if damage == "flip":
        shard.write_bytes(good[shard.name][:-1] + bytes([good[shard.name][-1] ^ 1]))
    elif damage == "cut":
        shard.write_bytes(good[shard.name][:-2])
    elif damage == "remove":
        shard.unlink()
    elif damage == "index":
        index.write_bytes(good[index.name][:-40])
    elif damage == "lie":
        raw = json.loads(good[index.name])
        raw["train"]["tokens"] = 10**12
        index.write_text(json.dumps(raw))
    else:
        raw = json.loads(good[index.name])
        raw["tokenizer"]["file"] = "../../secret"
        index.write_text(json.dumps(raw))
    with pytest.raises(DataError, match=f"delete {tokens.path}"):
        open_tokens(tokens.path)
    said: list[str] = []
    again = prepare(
        data, vocab_size=300, cache=tmp_path / "c", progress=lambda _d, _t, what: said.append(what)
    )
    assert any("building it again" in what for what in said)
    assert {p.name: p.read_bytes() for p in again.path.iterdir()} == good


def test_nothing_half_written_stays(stories: Path, tmp_path: Path) -> None:
    (stories / "zzz.txt").write_bytes(b"fine\n" * 10 + b"\0")
    with pytest.raises(DataError, match=r"zzz\.txt: byte 50 is NUL"):
        prepare({"name": "text", "path": str(stories)}, vocab_size=300, cache=tmp_path / "c")
    assert [p.suffix for p in (tmp_path / "c").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file is in the way")
    with pytest.raises(DataError, match=r"cannot be written .* set SHOAL_HOME"):
        prepare({"name": "text", "path": str(stories)}, vocab_size=300, cache=tmp_path / "c")


def test_a_full_disk(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.corpora.tokens._HashedFile.write", full)
    with pytest.raises(DataError, match=r"No space left on device.*free some space"):
        prepare({"name": "text", "path": str(stories)}, vocab_size=300, cache=tmp_path / "c")
    assert [p.suffix for p in (tmp_path / "c").iterdir()] == [".lock"]


def test_a_corpus_without_training_text(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(DataError, match="no text to train on in 2 documents"):
        prepare({"name": "jsonl", "path": str(tmp_path)}, vocab_size=300, cache=tmp_path / "c")


@pytest.mark.slow
@pytest.mark.multi
def test_several_processes_prepare_once(stories: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shoal.corpora.tokens import prepare\n"
        "built = []\n"
        "t = prepare({'name': 'text', 'path': sys.argv[1]}, vocab_size=300,\n"
        "            cache=Path(sys.argv[2]), progress=lambda d, n, w: built.append(w))\n"
        "print(t.fingerprint, len(t.train), 'tokenising' in built)"
    )
    # A killed process leaves its unfinished directory; whoever builds next clears it.
    first = prepare({"name": "text", "path": str(stories)}, vocab_size=300, cache=tmp_path / "d")
    (tmp_path / "c" / f".{first.fingerprint}.dead").mkdir(parents=True)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(stories), str(tmp_path / "c")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    lines = [process.communicate(timeout=120)[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert {tuple(line[:2]) for line in lines} == {(first.fingerprint, str(len(first.train)))}
    assert sorted(line[2] for line in lines) == ["False", "False", "True"]
    assert not list((tmp_path / "c").glob(".*"))
