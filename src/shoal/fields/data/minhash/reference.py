"""What the native functions of MinHash compute, in numpy: the oracle, and the fallback."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

PRIME = (1 << 61) - 1
_LOW = np.uint64(0xFFFFFFFF)
_M64 = (1 << 64) - 1


def signatures(
    data: Any,
    offsets: Any,
    n: int,
    is_word: Any,
    characters: int,
    ngram: int,
    a: Any,
    b: Any,
    slots: int,
    affine: int,
    out: Any,
    count: Any,
) -> None:
    """Signatures of documents, and their shingles."""
    out[:] = _LOW
    for at, words in enumerate(_documents(data, offsets, n, is_word)):
        hashes = [_sha1(one) for one in _shingles(words, characters, ngram)]
        count[at] = len(hashes)
        ends = np.array([0, len(hashes)])
        update(np.array(hashes, np.uint64), ends, 1, a, b, slots, affine, out[at : at + 1])


def update(
    hashes: Any, ends: Any, n: int, a: Any, b: Any, slots: int, affine: int, out: Any
) -> None:
    """Lower signatures by hashes."""
    for at in range(n):
        some = hashes[ends[at] : ends[at + 1], None] & _LOW
        if len(some):
            images = _finalized(some) * a + b if affine else (some * a + b) % np.uint64(PRIME)
            out[at] = np.minimum(out[at], (images & _LOW).min(axis=0))


def shingle_sets(
    data: Any,
    offsets: Any,
    n: int,
    is_word: Any,
    characters: int,
    ngram: int,
    out: Any,
    ends: Any,
) -> None:
    """Sorted sets of hashes of shingles."""
    filled = 0
    for at, words in enumerate(_documents(data, offsets, n, is_word)):
        some = sorted({_sha1(one) for one in _shingles(words, characters, ngram)})
        out[filled : filled + len(some)] = some
        filled += len(some)
        ends[at] = filled


def digests(data: Any, offsets: Any, n: int, is_word: Any, out: Any) -> None:
    """SHA-1 of the words of documents."""
    for at, words in enumerate(_documents(data, offsets, n, is_word)):
        digest = hashlib.sha1(" ".join(words).encode(), usedforsecurity=False).digest()
        out[at] = np.frombuffer(digest[:16], np.uint64)


def band_keys(slot: Any, n: int, slots: int, bands: int, rows: int, out: Any) -> None:
    """A key of each band of each signature."""
    for at in range(n):
        for band in range(bands):
            key = _mixed(rows + 1)
            for number in slot[at, band * rows : (band + 1) * rows].tolist():
                key = _mixed(key + 0x9E3779B97F4A7C15 + number)
            out[band, at] = key


def unite_equal(keys: Any, rows: Any, n: int, parent: Any) -> None:
    """Unite the rows of equal keys."""
    for at in np.flatnonzero(keys[1:n] == keys[: n - 1]):
        _unite(parent, rows[at], rows[at + 1])


def unite_similar(
    keys: Any,
    rows: Any,
    n: int,
    parent: Any,
    slot_of: Any,
    sets: Any,
    sizes: Any,
    threshold: float,
) -> int:
    """Unite similar rows of equal keys; ``sets`` has addresses."""
    import ctypes

    def members(row: int) -> set[int]:
        slot = slot_of[row]
        kind = ctypes.c_uint64 * int(sizes[slot])
        return set(kind.from_address(int(sets[slot]))) if sizes[slot] else set()

    compared, first, last = 0, list[int](), None
    for key, row in zip(keys[:n].tolist(), rows[:n].tolist(), strict=True):
        if key != last:
            first, last = [], key
        joined = False
        for other in first:
            if _find(parent, other) == _find(parent, row):
                joined = True
                continue
            compared += 1
            one, two = members(row), members(other)
            if len(one & two) >= threshold * len(one | two):
                _unite(parent, other, row)
                joined = True
        if not joined:
            first.append(row)
    return compared


def flatten(parent: Any, n: int) -> None:
    """The root of each row."""
    for at in range(n):
        parent[at] = _find(parent, at)


def _documents(data: Any, offsets: Any, n: int, is_word: Any) -> Iterator[list[str]]:
    """The words of each document."""
    for at in range(n):
        text = data[offsets[at] : offsets[at + 1]].tobytes().decode("utf-8", "replace")
        spaced = (one if is_word[ord(one) >> 3] >> (ord(one) & 7) & 1 else " " for one in text)
        yield [word for word in "".join(spaced).split(" ") if word]


def _shingles(words: list[str], characters: int, ngram: int) -> Iterator[str]:
    units: Any = " ".join(words) if characters else words
    for at in range(max(len(units) - ngram + 1, 1 if units else 0)):
        yield ("" if characters else " ").join(units[at : at + ngram])


def _sha1(text: str) -> int:
    return int.from_bytes(hashlib.sha1(text.encode(), usedforsecurity=False).digest()[:8], "little")


def _finalized(h: Any) -> Any:
    h = (h ^ h >> np.uint64(16)) * np.uint64(0x85EBCA6B) & _LOW
    h = (h ^ h >> np.uint64(13)) * np.uint64(0xC2B2AE35) & _LOW
    return h ^ h >> np.uint64(16)


def _mixed(x: int) -> int:
    x &= _M64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _M64
    return x ^ (x >> 31)


def _find(parent: Any, x: int) -> int:
    while parent[x] != x:
        x = parent[x]
    return int(x)


def _unite(parent: Any, x: int, y: int) -> None:
    x, y = _find(parent, x), _find(parent, y)
    parent[max(x, y)] = min(x, y)
