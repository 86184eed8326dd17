from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.corpora import tokenizer as bpe

TEXTS = [f"def function_{n}(value):\n    return value + {n} * total\n\n" for n in range(200)]


@functools.cache
def learned() -> Any:
    return bpe.train(TEXTS, 400)


@given(st.text(max_size=80))
def test_every_text_decodes_to_itself(text: str) -> None:
    ids = learned().encode(text, add_special_tokens=False).ids
    assert learned().decode(ids, skip_special_tokens=False) == text
    assert bpe.end_of_text(learned()) not in ids


def test_learning_is_deterministic_and_bounded() -> None:
    assert bpe.train(TEXTS, 400).to_str() == learned().to_str()
    assert bpe.check_vocab(learned(), 400, "bpe") <= 400
    assert bpe.end_of_text(learned()) == 0
    assert learned().id_to_token(0) == bpe.END_OF_TEXT
    assert bpe.check_vocab(bpe.train([], 300), 300, "bpe") == 257


def test_text_that_spells_the_end_of_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(learned().to_str())
    for tokenizer in (learned(), bpe.load(tmp_path)):
        ids = tokenizer.encode("a<|endoftext|>b", add_special_tokens=False).ids
        assert 0 not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"


@pytest.mark.parametrize("vocab_size", [0, 256, 2**21])
def test_vocabularies_that_cannot_be(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size = {vocab_size}: expected 257"):
        bpe.train(TEXTS, vocab_size)


def test_the_sample_is_bounded_and_spread() -> None:
    texts = [f"{n:04d}" * 25 for n in range(1000)]
    kept = [int(text[:4]) for text in bpe.sample(texts, 100_000, limit=10_000)]
    assert 95 <= len(kept) <= 100
    assert all(8 <= b - a <= 12 for a, b in itertools.pairwise(kept))
    assert list(bpe.sample(texts, 100_000)) == texts
    assert sum(map(len, bpe.sample(["x" * 10**6] * 3, 3 * 10**6, limit=1000))) <= 1000


def test_loading(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    loud = bpe.train(TEXTS, 400)
    loud.enable_truncation(3)
    loud.enable_padding(length=50)
    file.write_text(loud.to_str())
    loaded = bpe.load(file)
    assert loaded.encode(TEXTS[0]).ids == learned().encode(TEXTS[0]).ids
    with pytest.raises(ConfigError, match=r"vocabulary = \d+: expected at most .*vocab_size = 258"):
        bpe.check_vocab(loaded, 258, str(file))


def test_the_end_of_text_of_a_loaded_tokenizer(tmp_path: Path) -> None:
    raw = json.loads(learned().to_str())
    raw["added_tokens"][0]["content"] = "<odd>"
    raw["model"]["vocab"]["<odd>"] = raw["model"]["vocab"].pop(bpe.END_OF_TEXT)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    loaded = bpe.load(tmp_path)
    with pytest.raises(ConfigError, match="no end-of-text token"):
        bpe.end_of_text(loaded, tmp_path)
    beside = tmp_path / "tokenizer_config.json"
    for spelled in ("<odd>", {"content": "<odd>"}):
        beside.write_text(json.dumps({"eos_token": spelled}))
        assert bpe.end_of_text(loaded, tmp_path / "tokenizer.json") == 0
    beside.write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not a JSON object"):
        bpe.end_of_text(loaded, tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "not JSON"),
        (b"\x80\x04\x95pickle", "not JSON"),
        (b"[1]", "it has no 'model'"),
        (b'{"model": {"type": "Nonsense"}}', "cannot be used"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_bad_tokenizer_files(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        bpe.load(file)
    assert str(file) in str(caught.value)


def test_a_tokenizer_file_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text(learned().to_str())
    monkeypatch.setattr(bpe, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match="expected at most 100 bytes"):
        bpe.load(tmp_path)
