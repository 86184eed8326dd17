"""What ways to rank points and embedders of texts promise, and the values that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np

from shoal.core.errors import ConfigError
from shoal.fields.retrieve.collections import PointFilter, ScoredPoint

if TYPE_CHECKING:
    from shoal.fields.retrieve.search.rates import SearchRates

PointId: TypeAlias = int | str
"""What clients call a point: a whole number from 0 on, or a UUID."""


class SearchError(ConfigError):
    """A request that cannot be answered.

    Args:
        message: where, what was given, what is expected.
        status: of HTTP.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class SearchQuery:
    """What is asked.

    Args:
        vector: [dim], or None.
        text: words, or None.
        where: which points may answer; None for all.
        tenant: whose points are searched.
        exact: compare all vectors.
    """

    vector: Sequence[float] | None = None
    text: str | None = None
    where: PointFilter | None = None
    tenant: str = ""
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchWork:
    """What a query looks at.

    Args:
        points: of the collection.
        dim: numbers of a vector.
        k: points of the answer.
        postings: documents that have a word of the query, summed over its words.
    """

    points: int
    dim: int
    k: int
    postings: float


class Searchable(Protocol):
    """A collection, as ways to rank see it; both methods see the points of one tenant alone."""

    def nearest(self, query: SearchQuery, k: int) -> list[ScoredPoint]:
        """By vectors, the nearest first; a text without a vector is embedded.

        Raises:
            SearchError: the query has neither, or there is no embedder.
            VectorIndexError: a vector that cannot be used.
        """

    def matching(self, query: SearchQuery, k: int) -> list[ScoredPoint]:
        """By words, the best first.

        Raises:
            SearchError: the query has no text.
        """


@runtime_checkable
class SearchMethod(Protocol):
    """A way to rank points: a part of kind ``search_method``."""

    def rank(self, points: Searchable, query: SearchQuery, k: int) -> list[ScoredPoint]:
        """The best of a collection, the best first; equal ones by their number.

        Args:
            points: that are ranked.
            query: what is asked.
            k: at most so many.

        Raises:
            SearchError: the query lacks what is compared.
        """

    def query_s(self, rates: SearchRates, work: SearchWork) -> float:
        """Seconds of a query beyond its request."""


@runtime_checkable
class TextEmbedder(Protocol):
    """A way from texts to vectors: a part of kind ``embedder``."""

    def embed(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """Vectors of texts, float32 [N, dim].

        Args:
            texts: N of them.
            query: they ask; otherwise they answer. Most embedders treat both alike.

        Raises:
            SearchError: they cannot be had.
        """

    def dim_of(self, job_dim: int) -> int:
        """Numbers of a vector, for a job that says ``job_dim``; asks nobody."""
