"""BM25 over an inverted index whose documents come and go.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009;
weights of terms as in Lucene, ``log(1 + (N - n + 0.5) / (n + 0.5))``, are never negative, and need
no look at other terms when a document comes.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from shoal.fields.retrieve.grank.text import terms

_K1, _B = 1.5, 0.75


class WordIndex:
    """Documents by their words; callers keep other threads away.

    Scores are those of an index that was built of its documents at once.
    """

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, int]] = {}
        self._lengths: dict[int, int] = {}
        self._total = 0
        # Term -> its documents, how often each has it, and their lengths; until one changes.
        self._arrays: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, document: int, text: str) -> None:
        """A document that is not there comes."""
        words = Counter(terms(text))
        self._lengths[document] = words.total()
        self._total += words.total()
        for word, count in words.items():
            self._counts.setdefault(word, {})[document] = count
            self._arrays.pop(word, None)

    def remove(self, document: int, text: str) -> None:
        """A document that is there goes, with the text with which it came."""
        self._total -= self._lengths.pop(document)
        for word in set(terms(text)):
            of = self._counts[word]
            del of[document]
            self._arrays.pop(word, None)
            if not of:
                del self._counts[word]

    def frequency(self, word: str) -> int:
        """How many documents have a word."""
        return len(self._counts.get(word, ()))

    def search(self, text: str, k: int, among: np.ndarray | None = None) -> list[tuple[int, float]]:
        """(document, score) of those that have a word of the text, the best first.

        Args:
            text: words; one that comes twice counts twice.
            k: at most so many.
            among: documents, int64, sorted, none twice, of which the answer is; None for all. The
                scores do not depend on it.
        """
        words = {word: n for word, n in Counter(terms(text)).items() if word in self._counts}
        if not words:
            return []
        mean = self._total / len(self._lengths)
        documents, scores = [], []
        for word, times in words.items():
            ids, counts, lengths = self._postings(word)
            n = len(ids)
            weight = times * math.log1p((len(self._lengths) - n + 0.5) / (n + 0.5))
            norm = _K1 * (1 - _B + _B * lengths / mean)
            documents.append(ids)
            scores.append(weight * counts * (_K1 + 1) / (counts + norm))
        ids, places = np.unique(np.concatenate(documents), return_inverse=True)
        sums = np.bincount(places, np.concatenate(scores), len(ids))
        if among is not None:
            chosen = np.isin(ids, among, assume_unique=True)
            ids, sums = ids[chosen], sums[chosen]
        if len(ids) > k:  # ties at the edge stay until they are sorted
            edge = np.partition(sums, len(sums) - k)[len(sums) - k]
            ids, sums = ids[sums >= edge], sums[sums >= edge]
        order = np.lexsort((ids, -sums))[:k]
        return list(zip(ids[order].tolist(), sums[order].tolist(), strict=True))

    def _postings(self, word: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        arrays = self._arrays.get(word)
        if arrays is None:
            of = self._counts[word]
            lengths = [self._lengths[one] for one in of]
            arrays = self._arrays[word] = (
                np.fromiter(of, np.int64, len(of)),
                np.fromiter(of.values(), np.float64, len(of)),
                np.array(lengths, np.float64),
            )
        return arrays
