"""What indexes of vectors promise, and values that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import ConfigError

Metric: TypeAlias = Literal["l2", "ip", "cosine"]
"""Squared distance, inner product, or that of vectors of length 1."""


class VectorIndexError(ConfigError, ValueError):
    """Vectors, ids or queries that an index cannot use."""


@dataclass(frozen=True)
class Hits:
    """What searches found.

    Args:
        ids: int64 [Q, k], -1 where there are no more.
        distances: float32 [Q, k], the nearest first; of inner products the negative.
        stats: name -> int64 [Q]: what each query touched, such as ``compared`` vectors.
    """

    ids: np.ndarray
    distances: np.ndarray
    stats: Mapping[str, np.ndarray]


class IndexGrowth(Value):
    """What a larger collection costs over a smaller one: factors.

    Args:
        build: of the time to build.
        query: of the time of a query at the same recall.
        memory: of the bytes.
    """

    build: float
    query: float
    memory: float


class BuiltIndex(Protocol):
    """An index that has its vectors."""

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        """The nearest of each query.

        Args:
            queries: float32 [Q, d].
            k: of each.
            effort: the more, the nearer to exact, and the slower.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes of each component."""

    def save(self, directory: Path) -> Sequence[str]:
        """Write it; the names of the files."""


@runtime_checkable
class VectorIndex(Protocol):
    """A way to find the nearest vectors: a part of kind ``vector_index``."""

    efforts: ClassVar[tuple[float, ...]]
    """Rising efforts of a search, of which the first that finds enough is taken."""

    def growth(self, small: int, large: int) -> IndexGrowth:
        """How costs grow from one number of vectors to another."""

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Index vectors, whose ids are their rows.

        Args:
            vectors: float32 [N, d], checked; of length 1 for ``cosine``.
            metric: what is near.
            seed: of what is random.
            threads: for building and searching.

        Raises:
            VectorIndexError: there are too few.
        """

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        """The index that :meth:`BuiltIndex.save` has written.

        Args:
            directory: where.
            metric: with which it was built.
            threads: for searching.

        Raises:
            ShoalError: the files are missing or damaged.
        """
