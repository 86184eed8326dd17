"""One search for every sample of a datastore: lists are cleaned once, and sampled many times.

A passage is in a sample by the hash of its place alone, so the first passages of a list that are in
it are those that an index of the sample would give. Where too few are left, the list is searched
anew, four times as deep.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.retrieve.datastore.lists import (
    NGRAM,
    GramSets,
    WordHashes,
    passing,
    repeats,
    similar_texts,
)
from shoal.fields.retrieve.datastore.protocols import (
    DatastoreError,
    RankedLists,
    RetrievalOptions,
    padded,
)
from shoal.fields.retrieve.datastore.store import Datastore
from shoal.fields.retrieve.search.protocols import TextEmbedder

# Queries whose passages are in memory together, and how much deeper a list becomes.
_AT_ONCE, _DEEPER = 32, 4


class SampledLists(NamedTuple):
    """The first passages of each query in a sample.

    Args:
        lists: [Q, k].
        short: queries that have fewer than k, although all passages were searched.
        refilled: queries whose lists were searched anew for this sample.
    """

    lists: RankedLists
    short: int
    refilled: int


class StoreSweep:
    """Lists of some queries, from which the answers of any sample follow.

    Source: Shao et al., Scaling Retrieval-Based Language Models with a Trillion-Token Datastore,
    2024, section 3.

    Args:
        store: that is asked.
        queries: Q texts.
        against: text that is judged, one for each query; None where nothing is.
        options: of the steps; share and seed are those of :meth:`first`.
        filters: name -> filters: several sets, of which :meth:`first` takes one; None for those of
            the options, with the name ``""``.

    Attributes:
        overlap: share of the queries with a passage among their first k that repeats what is
            judged, before anything is dropped; 0 where nothing is judged.
        dropped: what each step has dropped from the lists.

    Raises:
        DatastoreError: not as many judged texts as queries.
        ShoalError: a query cannot be embedded, or a file has changed.
    """

    def __init__(
        self,
        store: Datastore,
        queries: Sequence[str],
        *,
        against: Sequence[str] | None = None,
        options: RetrievalOptions | None = None,
        filters: Mapping[str, Sequence[Choice]] | None = None,
    ) -> None:
        if against is not None and len(against) != len(queries):
            raise DatastoreError(
                f"against: {len(against)} texts for {len(queries)} queries; give one for each"
            )
        self.options = options or RetrievalOptions()
        self._store, self._queries, self._against = store, list(queries), against
        self._filters = {"": self.options.filters} if filters is None else dict(filters)
        self._depth = np.zeros(len(queries), np.int64)
        self._clean: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
            name: [(np.empty(0, np.int64), np.empty(0))] * len(queries) for name in self._filters
        }
        self.dropped = {"decontaminated": 0, "duplicates": 0, **dict.fromkeys(self._filters, 0)}
        self._overlapping = 0
        self._extend(np.arange(len(queries)), self.options.depth)
        self.overlap = self._overlapping / max(len(queries), 1)
        if against is not None and not self.options.decontaminate and self.overlap:
            warnings.warn(
                f"{self.overlap:.0%} of the queries get a passage that repeats the text that is "
                "judged: what a reader scores with it says nothing; set decontaminate: true, or "
                "keep that text out of the datastore",
                stacklevel=2,
            )

    def first(self, share: float = 1.0, seed: int = 0, filters: str | None = None) -> SampledLists:
        """The first k passages of each query in a sample.

        Args:
            share: of the passages, in (0, 1].
            seed: of the sample.
            filters: name of a set of filters; None for the first.

        Raises:
            DatastoreError: a share beyond its range, or no such set.
        """
        name = next(iter(self._filters)) if filters is None else filters
        if not 0 < share <= 1 or name not in self._filters:
            raise DatastoreError(
                f"share = {share:g}, filters = {name!r}: expected a share in (0, 1] and one of "
                f"{', '.join(map(repr, self._filters))}"
            )
        sampled = self._store.passages.sampled(share, seed)
        most = max(self.options.k, self.options.rerank_depth if self.options.rerank else 0)
        refilled = set[int]()

        def rows() -> list[tuple[np.ndarray, np.ndarray]]:
            return [(ids[sampled[ids]], of[sampled[ids]]) for ids, of in self._clean[name]]

        while True:
            now = rows()
            few = np.array([len(ids) < most for ids, _ in now], bool)
            again = np.flatnonzero(few & (self._depth < len(self._store)))
            if not len(again):
                break
            refilled.update(again.tolist())
            self._extend(again, _DEEPER * int(self._depth[again].min()))
        if self.options.rerank is not None:
            now = self._reranked(now, self.options.rerank)
        lists = padded(now, self.options.k)
        return SampledLists(lists, int((lists.ids[:, -1] < 0).sum()), len(refilled))

    def _extend(self, queries: np.ndarray, depth: int) -> None:
        """Search some queries so deep, and clean their lists."""
        depth = min(depth, len(self._store))
        for at in range(0, len(queries), _AT_ONCE):
            some = queries[at : at + _AT_ONCE]
            lists = self._store.search([self._queries[one] for one in some], depth)
            self._depth[some] = depth
            self._keep(some, lists)

    def _keep(self, queries: np.ndarray, lists: RankedLists) -> None:
        chosen = self.options
        there = lists.ids >= 0
        ids, places = np.unique(lists.ids[there], return_inverse=True)
        texts = self._store.passages.texts(ids)
        rows = np.full(lists.ids.shape, -1, np.int64)
        rows[there] = places
        words = WordHashes.of(texts)
        grams = GramSets.of(words, NGRAM)
        stay = [row[row >= 0] for row in rows]
        of = [row[row >= 0] for row in np.where(there, np.arange(lists.ids.shape[1]), -1)]
        if self._against is not None:
            targets = [self._against[one] for one in queries]
            repeated = self._repeated(words, grams, stay, targets)
            self._overlapping += sum(bool(one[: chosen.k].any()) for one in repeated)
            if chosen.decontaminate:
                self._drop(stay, of, repeated, "decontaminated")
        if chosen.dedupe:
            similar = similar_texts(grams, chosen.jaccard)
            self._drop(stay, of, [~similar.kept(row) for row in stay], "duplicates")
        for name, filters in self._filters.items():
            passes = passing(texts, filters) if filters else np.ones(len(texts), bool)
            for query, row, place, scores in zip(queries, stay, of, lists.scores, strict=True):
                kept = passes[row]
                self.dropped[name] += int((~kept).sum())
                self._clean[name][query] = (ids[row[kept]], scores[place[kept]])

    def _repeated(
        self,
        words: WordHashes,
        grams: GramSets,
        rows: Sequence[np.ndarray],
        targets: Sequence[str],
    ) -> list[np.ndarray]:
        """For each query, which of its passages repeat what is judged."""
        longer, targets_words = self.options.run_words + 1, WordHashes.of(targets)
        runs = GramSets.of(words, longer, least=longer)
        judged = GramSets.of(targets_words, NGRAM)
        judged_runs = GramSets.of(targets_words, longer, least=longer)
        return [
            repeats(grams, runs, row, judged[at], judged_runs[at], self.options.jaccard)
            for at, row in enumerate(rows)
        ]

    def _drop(
        self,
        rows: list[np.ndarray],
        places: list[np.ndarray],
        bad: Sequence[np.ndarray],
        step: str,
    ) -> None:
        for at, some in enumerate(bad):
            rows[at], places[at] = rows[at][~some], places[at][~some]
            self.dropped[step] += int(some.sum())

    def _reranked(
        self, rows: Sequence[tuple[np.ndarray, np.ndarray]], choice: Choice
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The first passages by their similarity to the query, and none behind them."""
        embedder: TextEmbedder = table("embedder").build(choice, where="rerank")
        result = []
        for query, (ids, _) in zip(self._queries, rows, strict=True):
            some = ids[: self.options.rerank_depth]
            vectors = embedder.embed([query, *self._store.passages.texts(some)])
            vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            scores = (vectors[1:] @ vectors[0]).astype(np.float64)
            order = np.argsort(-scores, kind="stable")
            result.append((some[order], scores[order]))
        return result
