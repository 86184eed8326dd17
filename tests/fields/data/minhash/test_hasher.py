"""MinHash: signatures are datasketch's bit by bit, whatever the processor and the text."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.fields.data.minhash import MinHasher
from shoal.fields.data.minhash.hasher import DocumentTexts, native, text_digests

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "the QUICK brown fox; jumps over the lazy dog and -- the dog does not mind",
    "short one",
    "",
    " ... !!",
    "Größe ÄÖÜ straße ελληνικά кириллица 数据 去重 e\u0301",
    "x" * 200 + " " + "y" * 60 + " a b c d e f",
    "snake_case and 123 numbers 4.5",
]
LIBRARIES = {"native": native(), "scalar": native("-DSHOAL_SCALAR"), "numpy": None}


def words(text: str) -> list[str]:
    return [word for word in re.split(r"\W+", text.lower()) if word]


def shingles(text: str, unit: str, n: int) -> list[str]:
    units: Any = words(text) if unit == "words" else " ".join(words(text))
    join = " " if unit == "words" else ""
    return [join.join(units[at : at + n]) for at in range(max(len(units) - n + 1, bool(units)))]


def sha1(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:size], "little")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("unit", "n"), [("words", 1), ("words", 5), ("characters", 4)])
@pytest.mark.parametrize("num_perm", [1, 16, 100, 128])
@pytest.mark.parametrize("scheme", ["affine32", "legacy"])
def test_signatures_are_those_of_datasketch(
    library: str, unit: Any, n: int, num_perm: int, scheme: Any
) -> None:
    datasketch = pytest.importorskip("datasketch")
    if library != "numpy" and LIBRARIES[library] is None:
        pytest.skip("no C++ compiler")
    given = LIBRARIES[library]
    hasher = MinHasher(num_perm, seed=7, unit=unit, ngram=n, scheme=scheme, library=given)
    ours, count = hasher.signatures(TEXTS)
    for text, signature, many in zip(TEXTS, ours, count, strict=True):
        theirs = datasketch.MinHash(num_perm=num_perm, seed=7, scheme=scheme)
        some = shingles(text, unit, n)
        theirs.update_batch([one.encode() for one in some])
        assert signature.tolist() == theirs.hashvalues.tolist()
        assert many == len(some)


def test_datatrove_draws_the_same_functions_in_another_order() -> None:
    """All a and then all b, as its ``MinhashDedupSignature.parameters`` and text-dedup do."""
    hasher, prime = MinHasher(12, seed=4, ngram=1, scheme="datatrove"), np.uint64(2**61 - 1)
    random = np.random.RandomState(4)
    a = random.randint(1, prime, dtype=np.uint64, size=12)
    b = random.randint(0, prime, dtype=np.uint64, size=12)
    hashes = np.array([[sha1(word, 4)] for word in words(TEXTS[0])], np.uint64)
    expected = ((hashes * a + b) % prime & np.uint64(2**32 - 1)).min(axis=0)
    assert hasher.signatures(TEXTS[:1])[0][0].tolist() == expected.tolist()


def test_sets_of_hashes_are_those_of_datasketch() -> None:
    datasketch = pytest.importorskip("datasketch")
    draw = np.random.default_rng(0)
    sets = [draw.integers(0, 2**32, size) for size in (0, 1, 50)]
    ours = MinHasher(40, seed=3).of_hashes(sets)
    for signature, some in zip(ours, sets, strict=True):
        theirs = datasketch.MinHash(40, seed=3, hashfunc=int)
        theirs.update_batch(some.tolist())
        assert signature.tolist() == theirs.hashvalues.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=80), max_size=20), st.sampled_from(["words", "characters"]))
def test_native_equals_numpy(texts: list[str], unit: Any) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    one, two = (MinHasher(20, unit=unit, ngram=3, library=lib) for lib in (native(), None))
    for ours, theirs in (
        (one.signatures(texts), two.signatures(texts)),
        (one.shingle_sets(texts), two.shingle_sets(texts)),
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert a.tolist() == b.tolist()
    assert text_digests(texts).tolist() == text_digests(texts, library=None).tolist()


def test_digests_and_sets() -> None:
    hashes, ends = MinHasher(1, ngram=2).shingle_sets(TEXTS)
    for at, text in enumerate(TEXTS):
        expected = sorted({sha1(one, 8) for one in shingles(text, "words", 2)})
        assert hashes[ends[at - 1] if at else 0 : ends[at]].tolist() == expected
    digests = text_digests(TEXTS)
    assert digests[3].tolist() == digests[4].tolist()
    text = " ".join(words(TEXTS[0]))
    assert digests[0].tobytes() == hashlib.sha1(text.encode()).digest()[:16]


def test_the_estimate_has_no_bias() -> None:
    """Over many pairs of sets, the mean error is within four standard errors of none."""
    draw, k = np.random.default_rng(0), 32
    hasher = MinHasher(k)
    pairs, errors = [], []
    for _ in range(2000):
        both, rest = draw.integers(1, 30, 2)
        base = draw.integers(0, 2**32, both + 2 * rest)
        pairs.append((base[: both + rest], np.r_[base[:both], base[both + rest :]], both, rest))
    one = hasher.of_hashes([pair[0] for pair in pairs])
    two = hasher.of_hashes([pair[1] for pair in pairs])
    variance = 0.0
    for a, b, (_, _, both, rest) in zip(one, two, pairs, strict=True):
        truth = both / (both + 2 * rest)
        errors.append((a == b).mean() - truth)
        variance += truth * (1 - truth) / k
    assert abs(sum(errors)) < 4 * variance**0.5


def test_slices_chunks_nulls_and_other_types() -> None:
    texts = pa.array(["a b", None, "c d e", "f"])
    assert DocumentTexts(texts).n == 4
    hasher = MinHasher(8, ngram=1)
    whole, count = hasher.signatures(texts)
    assert count.tolist() == [2, 0, 3, 1]
    for other in (
        pa.chunked_array([texts[:1], texts[1:]]),
        texts.cast(pa.large_string()),
        texts.dictionary_encode(),
        ["a b", None, "c d e", "f"],
    ):
        assert hasher.signatures(other)[0].tolist() == whole.tolist()
    assert hasher.signatures(texts[2:])[0].tolist() == whole[2:].tolist()
    assert hasher.signatures([])[0].shape == (0, 8)


def test_bytes_that_are_no_text_do_no_harm() -> None:
    """Arrow does not check what it is given; every byte is a character of its own then."""
    data = bytes(range(256)) * 3 + b"\xf0\x9f"
    offsets = np.array([0, 300, len(data)], np.int64)
    array = pa.LargeStringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(data))
    from shoal.fields.data.minhash.hasher import call, word_points

    out, count = np.empty((2, 16), np.uint32), np.empty(2, np.int64)
    hasher = MinHasher(16)
    bytes_ = np.frombuffer(data, np.uint8)
    given = (bytes_, offsets, 2, word_points(), 0, 5, hasher.a, hasher.b, 16, 1, out, count)
    call(native(), "signatures", *given)
    assert (count > 0).all()
    assert len(array) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_perm": 0}, "num_perm = 0: expected a number from 1"),
        ({"ngram": 0}, "ngram = 0: expected"),
        ({"seed": -1}, "seed = -1: expected a number from 0"),
        ({"seed": 2**32}, "seed = 4294967296: expected"),
    ],
)
def test_options_that_cannot_be(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MinHasher(**options)
