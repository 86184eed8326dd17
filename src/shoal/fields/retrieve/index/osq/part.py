"""The part ``osq``: parts of vectors as a few bits for each number, searched in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.fields.retrieve.index.osq.files import load_index, save_index
from shoal.fields.retrieve.index.osq.index import OSQIndex
from shoal.fields.retrieve.index.protocols import BuiltIndex, Hits, IndexGrowth, Metric

# Vectors of a part when the number of parts is left open.
_EACH = 4096


@part
class ScalarSegments:
    """Vectors as scalar codes in bit segments: signs, then bounds, then exact distances.

    Source: Oakley and Ferhatosmanoglu, SQUASH: Serverless and Distributed Quantization-based
    Attributed Vector Similarity Search, 2025.
    :class:`~shoal.fields.retrieve.index.osq.index.OSQIndex` has attributes and filters.

    Args:
        bits_per_dim: of a vector, on average.
        parts: how many; 0 for one of 4,096 vectors each.
    """

    bits_per_dim: Annotated[float, Gt(0), Le(8)] = 4.0
    parts: Annotated[int, Ge(0), Le(4096)] = 0

    efforts: ClassVar = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

    def growth(self, small: int, large: int) -> IndexGrowth:
        """Parts keep their size; the query visits more of them where they lie closer."""
        more = large / small
        return IndexGrowth(build=more, query=more**0.5, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Partition, rotate and encode the vectors."""
        parts = self.parts or min(4096, max(1, round(len(vectors) / _EACH)))
        index = OSQIndex(self.bits_per_dim, parts, metric=metric, seed=seed)
        index.build(vectors, threads=threads)
        return _Segments(index, threads)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        return _Segments(load_index(directory / "osq"), threads)


@dataclass
class _Segments:
    index: OSQIndex
    threads: int

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        """The nearest of each query; more effort visits more parts and keeps more of each."""
        return self.index.search(
            queries, k, beta=1 + 0.15 * effort, keep=min(1.0, 0.1 * effort),
            rerank=max(1.0, 2 * effort), threads=self.threads,
        )  # fmt: skip

    def memory(self) -> Mapping[str, int]:
        return self.index.memory()

    def save(self, directory: Path) -> Sequence[str]:
        """A directory with a file for each part."""
        return [save_index(self.index, directory / "osq").name]
