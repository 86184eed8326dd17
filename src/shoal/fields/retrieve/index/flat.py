"""The part ``flat``: every vector is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.files import load_vectors, save_vectors
from shoal.fields.retrieve.index.protocols import BuiltIndex, Hits, IndexGrowth, Metric


@part
class Flat:
    """Compare every vector with the query; always right."""

    efforts: ClassVar = (1.0,)

    def growth(self, small: int, large: int) -> IndexGrowth:
        """All in proportion."""
        more = large / small
        return IndexGrowth(build=more, query=more, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Keep the vectors."""
        return _FlatVectors(vectors, metric)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        """Read the vectors."""
        return _FlatVectors(load_vectors(directory), metric)


@dataclass
class _FlatVectors:
    vectors: np.ndarray
    metric: Metric

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        """Compare all."""
        hits = exact_neighbours(self.vectors, queries, k, self.metric)
        compared = np.full(len(queries), len(self.vectors), np.int64)
        return Hits(ids=hits.ids, distances=hits.distances, stats={"compared": compared})

    def memory(self) -> Mapping[str, int]:
        """The vectors."""
        return {"vectors": self.vectors.nbytes}

    def save(self, directory: Path) -> Sequence[str]:
        """The vectors as safetensors."""
        return [save_vectors(directory, self.vectors, self.metric)]
