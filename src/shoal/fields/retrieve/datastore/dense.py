"""The passage index ``dense``: vectors of passages in an index of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from shoal.core.config import Kind
from shoal.core.parts import Choice, part, table
from shoal.fields.retrieve.datastore.protocols import (
    BuiltPassageIndex,
    CorpusCounts,
    RankedLists,
    best_of,
    padded,
)
from shoal.fields.retrieve.index.protocols import BuiltIndex, IndexGrowth, Metric, VectorIndex
from shoal.fields.retrieve.index.vectors import checked_vectors
from shoal.fields.retrieve.search.protocols import TextEmbedder

# Texts that are embedded together.
_AT_ONCE = 1024
# Of vectors of length 1 it ranks as their cosine does, and an exact search computes it for each
# pair alone, so that no score depends on the other passages of a shard.
_METRIC: Metric = "l2"


@part
class PassageVectors:
    """Passages near a query by the cosine of their vectors.

    Args:
        embedder: makes vectors of texts.
        index: finds the nearest of a shard.
        effort: of its searches; 0 for the middle one of those that the index names.
    """

    embedder: Annotated[Choice, Kind("embedder")] = Choice(name="hashed_words")
    index: Annotated[Choice, Kind("vector_index")] = Choice(name="flat")
    effort: Annotated[float, Ge(0)] = 0.0

    def growth(self, small: int, large: int) -> IndexGrowth:
        """Embedding, which most of the time goes to, is in proportion; the rest is the index's."""
        of = self._index().growth(small, large)
        return IndexGrowth(build=large / small, query=of.query, memory=of.memory)

    def build(self, texts: Sequence[str], place: Path, *, seed: int, threads: int) -> int:
        """Embed the passages and index their vectors."""
        embedder = self._embedder()
        vectors = np.concatenate(
            [
                _directions(embedder, texts[at : at + _AT_ONCE])
                for at in range(0, len(texts), _AT_ONCE)
            ]
        )
        built = self._index().build(vectors, _METRIC, seed=seed, threads=threads)
        folder = _folder(place)
        folder.mkdir(parents=True, exist_ok=True)
        built.save(folder)
        return 0

    def open(self, place: Path, *, threads: int) -> BuiltPassageIndex:
        """Read the index of the vectors."""
        index = self._index()
        built = index.open(_folder(place), _METRIC, threads=threads)
        effort = self.effort or index.efforts[len(index.efforts) // 2]
        return _Vectors(built, self._embedder(), effort)

    def _index(self) -> VectorIndex:
        index: VectorIndex = table("vector_index").build(self.index, where="dense.index")
        return index

    def _embedder(self) -> TextEmbedder:
        embedder: TextEmbedder = table("embedder").build(self.embedder, where="dense.embedder")
        return embedder


@dataclass
class _Vectors:
    index: BuiltIndex
    embedder: TextEmbedder
    effort: float

    def frequencies(self, texts: Sequence[str]) -> np.ndarray:
        """None: no score depends on other passages."""
        return np.empty(0, np.int64)

    def search(
        self, texts: Sequence[str], k: int, counts: CorpusCounts, frequencies: np.ndarray
    ) -> RankedLists:
        """The nearest of each query."""
        hits = self.index.search(_directions(self.embedder, texts), k, self.effort)
        rows = []
        for ids, apart in zip(hits.ids, hits.distances, strict=True):
            there = ids >= 0
            # Distances of vectors of length 1: 2 - 2 cos.
            rows.append(best_of(ids[there], 1 - apart[there].astype(np.float64) / 2, k))
        return padded(rows, hits.ids.shape[1])


def _folder(place: Path) -> Path:
    return place.with_suffix(".index")


def _directions(embedder: TextEmbedder, texts: Sequence[str]) -> np.ndarray:
    vectors = np.asarray(embedder.embed(texts))
    return checked_vectors(vectors, vectors.shape[-1], "cosine")
