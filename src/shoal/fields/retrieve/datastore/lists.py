"""Lists of passages without those that repeat what is judged, or each other, or break a rule.

Decontamination and deduplication compare sets of 13-grams of words; a text of fewer words is one
gram. Candidates for duplicates share a band of their MinHash signatures, and each pair of them is
compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.data.filters.protocols import FilterBatch, TextFilter
from shoal.fields.data.minhash import MinHasher, bands_reaching
from shoal.fields.data.minhash.lsh import band_keys
from shoal.fields.data.readers import arrow
from shoal.fields.retrieve.datastore.passages import mixed, word_hash
from shoal.fields.retrieve.grank.text import terms

NGRAM = 13
_SLOTS = 128
_LOW = np.uint64(0xFFFFFFFF)
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 2**64)
# Of the pairs at the threshold, the share that shares a band.
_RECALL = 0.999


class WordHashes(NamedTuple):
    """The words of some texts, in lower case.

    Args:
        hashes: uint64, of each word, text by text.
        ends: int64 [texts + 1], where each text begins, and the end of the last.
    """

    hashes: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[str]) -> WordHashes:
        """Those of some texts."""
        words = [terms(text) for text in texts]
        ends = np.cumsum([0, *map(len, words)], dtype=np.int64)
        hashes = (word_hash(word) for some in words for word in some)
        return cls(np.fromiter(hashes, np.uint64, int(ends[-1])), ends)


@dataclass(frozen=True)
class GramSets:
    """Sets of hashes of n-grams, one for each text.

    Args:
        hashes: uint64, set by set, each in ascending order.
        ends: int64 [texts + 1], where each begins, and the end of the last.
    """

    hashes: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, words: WordHashes, ngram: int, *, least: int = 1) -> GramSets:
        """Those of some texts; one of fewer words than a gram, but ``least``, is one gram.

        Args:
            words: of the texts.
            ngram: words of a gram.
            least: words.
        """
        sizes = np.diff(words.ends)
        grams = np.where(sizes >= ngram, sizes - ngram + 1, sizes >= least)
        ends = np.concatenate([[0], np.cumsum(grams)])
        owner = np.repeat(np.arange(len(sizes)), grams)
        first = words.ends[owner] + np.arange(ends[-1]) - ends[owner]
        last = np.minimum(first + ngram, words.ends[owner + 1])
        # A polynomial of the words, modulo 2^64: sums of word times power from the beginning, of
        # which the difference of two is divided by the power of the first word.
        with np.errstate(over="ignore"):
            count = len(words.hashes)
            steps = np.full(count + 1, _FACTOR, np.uint64)
            steps[0] = 1
            powers = np.multiply.accumulate(steps)
            steps[1:] = _INVERSE
            sums = np.zeros(count + 1, np.uint64)
            np.cumsum(words.hashes * powers[:-1], out=sums[1:])
            hashes = mixed((sums[last] - sums[first]) * np.multiply.accumulate(steps)[first])
        order = np.lexsort((hashes, owner))
        hashes, owner = hashes[order], owner[order]
        new = np.ones(len(hashes), bool)
        new[1:] = (hashes[1:] != hashes[:-1]) | (owner[1:] != owner[:-1])
        sizes = np.bincount(owner[new], minlength=len(sizes))
        return cls(hashes[new], np.concatenate([[0], np.cumsum(sizes)]))

    def __getitem__(self, at: int) -> np.ndarray:
        return self.hashes[self.ends[at] : self.ends[at + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """Int64 [texts]: grams of each."""
        return np.diff(self.ends)

    def shared(self, rows: np.ndarray, other: np.ndarray) -> np.ndarray:
        """How many grams some of the sets share with another, int64 [rows].

        Args:
            rows: which.
            other: a set, in ascending order.
        """
        if not len(rows) or not len(other):
            return np.zeros(len(rows), np.int64)
        sizes = self.sizes[rows]
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1]) + np.repeat(self.ends[rows] - (ends - sizes), sizes)
        hashes = self.hashes[places]
        at = np.minimum(np.searchsorted(other, hashes), len(other) - 1)
        sums = np.concatenate([[0], np.cumsum(other[at] == hashes)])
        return np.asarray(sums[ends] - sums[ends - sizes])


def repeats(
    grams: GramSets,
    runs: GramSets,
    rows: np.ndarray,
    target: np.ndarray,
    target_runs: np.ndarray,
    jaccard: float,
) -> np.ndarray:
    """Which passages repeat a text, bool [rows]: they share a long run, or most of their grams.

    Args:
        grams: 13-grams of the passages.
        runs: grams of the passages that are a word longer than a run that is allowed.
        rows: which passages.
        target: 13-grams of the text.
        target_runs: its long grams.
        jaccard: similarity that is allowed.
    """
    both = grams.shared(rows, target)
    either = grams.sizes[rows] + len(target) - both
    return np.asarray((both > jaccard * either) | (runs.shared(rows, target_runs) > 0))


class SimilarTexts(NamedTuple):
    """Which texts are nearly the same.

    Args:
        stands: int64 [n], the first text with the same set as each.
        near: for each text that is such a first one, the others of them that are similar to it.
    """

    stands: np.ndarray
    near: Sequence[set[int]]

    def kept(self, rows: np.ndarray) -> np.ndarray:
        """Bool [rows]: what stays of a list when each that is similar to a better one is dropped.

        One that is dropped drops no other.

        Args:
            rows: texts, the best first.
        """
        chosen = set[int]()
        kept = np.zeros(len(rows), bool)
        for place, text in enumerate(self.stands[rows].tolist()):
            if text not in chosen and chosen.isdisjoint(self.near[text]):
                chosen.add(text)
                kept[place] = True
        return kept


def similar_texts(grams: GramSets, jaccard: float) -> SimilarTexts:
    """The pairs of texts whose Jaccard similarity is above a threshold.

    Args:
        grams: of n texts.
        jaccard: the threshold, below 1.
    """
    count = len(grams.sizes)
    near: list[set[int]] = [set() for _ in range(count)]
    first: dict[bytes, int] = {}
    stands = np.arange(count)
    for at in range(count):
        if len(grams[at]):  # a text without a word is like no other
            stands[at] = first.setdefault(grams[at].tobytes(), at)
    alone = np.array(list(first.values()), np.int64)
    if len(alone) < 2:
        return SimilarTexts(stands, near)
    signatures = MinHasher(_SLOTS).of_hashes([grams[at] & _LOW for at in alone.tolist()])
    compared: set[tuple[int, int]] = set()
    for keys in band_keys(signatures, bands_reaching(jaccard, _RECALL, _SLOTS)):
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.diff(keys[order])) + 1
        begins, ends = np.append(0, edges), np.append(edges, len(order))
        several = ends - begins > 1
        for begin, end in zip(begins[several], ends[several], strict=True):
            members = alone[order[begin:end]].tolist()
            for place, one in enumerate(members[:-1]):
                pairs = {(one, other) for other in members[place + 1 :]} - compared
                compared |= pairs
                others = np.array(sorted(other for _, other in pairs), np.int64)
                both = grams.shared(others, grams[one])
                either = grams.sizes[others] + len(grams[one]) - both
                for other in others[both > jaccard * either].tolist():
                    near[one].add(other)
                    near[other].add(one)
    return SimilarTexts(stands, near)


def passing(texts: Sequence[str], filters: Sequence[Choice]) -> np.ndarray:
    """Bool [n]: texts that no filter drops; what a filter would change in a text stays as it is.

    Args:
        texts: n texts.
        filters: in order; what one has dropped is not shown to the next.
    """
    batch = FilterBatch(arrow().array(list(texts), arrow().large_string()))
    for choice in filters:
        one: TextFilter = table("text_filter").build(choice, where="filters")
        batch.alive &= one.judge(batch).broken < 0
    return batch.alive
