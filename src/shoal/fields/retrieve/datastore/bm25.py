"""The passage index ``bm25``: postings of words as arrays, mapped from files.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009;
weights of words as in Lucene. Counts of passages are those of all shards together, so that a score
does not depend on how passages are divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.files import open_atomic
from shoal.core.parts import part
from shoal.fields.retrieve.datastore.passages import word_hash
from shoal.fields.retrieve.datastore.protocols import (
    BuiltPassageIndex,
    CorpusCounts,
    DatastoreError,
    RankedLists,
    best_of,
    padded,
)
from shoal.fields.retrieve.grank.text import terms
from shoal.fields.retrieve.index.protocols import IndexGrowth

_ARRAYS = ("words", "begins", "passages", "counts", "lengths")


@part
class WordPostings:
    """Passages that have the words of a query.

    Args:
        k1: how soon further occurrences of a word count no more.
        b: how much the length of a passage counts.
    """

    k1: Annotated[float, Ge(0), Le(10)] = 1.5
    b: Annotated[float, Ge(0), Le(1)] = 0.75

    def growth(self, small: int, large: int) -> IndexGrowth:
        """All in proportion."""
        more = large / small
        return IndexGrowth(build=more, query=more, memory=more)

    def build(self, texts: Sequence[str], place: Path, *, seed: int, threads: int) -> int:
        """Sort the words of all passages."""
        words: list[int] = []
        counts: list[int] = []
        lengths = np.zeros(len(texts), np.int32)
        owners = np.zeros(len(texts), np.int64)
        for at, text in enumerate(texts):
            has = Counter(terms(text))
            lengths[at], owners[at] = has.total(), len(has)
            words.extend(map(word_hash, has))
            counts.extend(has.values())
        hashes = np.array(words, np.uint64)
        order = np.argsort(hashes, kind="stable")
        known, begins = np.unique(hashes[order], return_index=True)
        arrays: dict[str, np.ndarray] = {
            "words": known,
            "begins": np.append(begins, len(hashes)).astype(np.int64),
            "passages": np.repeat(np.arange(len(texts), dtype=np.int32), owners)[order],
            "counts": np.array(counts, np.int32)[order],
            "lengths": lengths,
        }
        for name, array in arrays.items():
            with open_atomic(_file(place, name)) as file:
                np.save(file, array, allow_pickle=False)
        return int(lengths.sum())

    def open(self, place: Path, *, threads: int) -> BuiltPassageIndex:
        """Map the files."""
        arrays = []
        for name in _ARRAYS:
            path = _file(place, name)
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError) as cause:
                raise DatastoreError(
                    f"{path}: cannot be read ({cause}); build the datastore again"
                ) from cause
        words, begins, passages, counts, lengths = arrays
        if (
            len(begins) != len(words) + 1
            or begins[-1] != len(passages)
            or len(counts) != begins[-1]
        ):
            raise DatastoreError(f"{place}: postings of other words; build the datastore again")
        return _Postings(self, words, begins, passages, counts, np.asarray(lengths, np.float64))


@dataclass
class _Postings:
    part: WordPostings
    words: np.ndarray
    begins: np.ndarray
    passages: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray

    def frequencies(self, texts: Sequence[str]) -> np.ndarray:
        """Passages of each word of each text, one text after the other."""
        pieces = [np.empty(0, np.int64), *(np.diff(self._places(_wanted(one)[0])) for one in texts)]
        return np.concatenate([one.reshape(-1) for one in pieces])

    def search(
        self, texts: Sequence[str], k: int, counts: CorpusCounts, frequencies: np.ndarray
    ) -> RankedLists:
        """Sum the weights of the words of each query."""
        mean = counts.words / max(counts.passages, 1)
        norm = self.part.k1 * (1 - self.part.b + self.part.b * self.lengths / max(mean, 1e-9))
        rows, taken = [], 0
        for text in texts:
            hashes, times = _wanted(text)
            having = frequencies[taken : taken + len(hashes)]
            taken += len(hashes)
            weights = times * np.log1p((counts.passages - having + 0.5) / (having + 0.5))
            scores = np.zeros(len(self.lengths))
            for (begin, end), weight in zip(self._places(hashes).tolist(), weights, strict=True):
                some, of = self.passages[begin:end], self.counts[begin:end]
                scores[some] += weight * of * (self.part.k1 + 1) / (of + norm[some])
            there = np.flatnonzero(scores)
            rows.append(best_of(there, scores[there], k))
        return padded(rows, min(k, len(self.lengths)))

    def _places(self, hashes: np.ndarray) -> np.ndarray:
        """(begin, end) of the postings of each word; equal where there are none."""
        at = np.searchsorted(self.words, hashes)
        there = np.minimum(at, max(len(self.words) - 1, 0))
        known = self.words[there] == hashes if len(self.words) else np.zeros(len(hashes), bool)
        both = np.stack([self.begins[at], self.begins[np.minimum(at + 1, len(self.words))]], axis=1)
        both[~known, 1] = both[~known, 0]
        return both


def _wanted(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the words of a query, in the order of the hashes, and how often each comes."""
    has = Counter(terms(text))
    hashes = np.fromiter(map(word_hash, has), np.uint64, len(has))
    order = np.argsort(hashes)
    return hashes[order], np.fromiter(has.values(), np.float64, len(has))[order]


def _file(place: Path, name: str) -> Path:
    return place.with_suffix(f".{name}.npy")
