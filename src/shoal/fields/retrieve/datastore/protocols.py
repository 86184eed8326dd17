"""What indexes of passages promise, and the values that searches of a datastore share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from pydantic import NonNegativeInt, PositiveInt, model_validator

from shoal.core.config import Kind, Value
from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.fields.retrieve.index.protocols import IndexGrowth


class DatastoreError(ConfigError):
    """A datastore that cannot be built, opened or asked like this."""


class RankedLists(NamedTuple):
    """Passages of each query, the best first.

    Args:
        ids: int64 [Q, K], -1 where there are no more.
        scores: float64 [Q, K], higher is better; -inf where there are no more.
    """

    ids: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True)
class Passage:
    """A passage that was retrieved.

    Args:
        id: its number in the datastore.
        file: name of the file.
        offset: byte at which it begins there.
        length: bytes.
        score: of the search, or of the reranking.
        text: read from the file.
    """

    id: int
    file: str
    offset: int
    length: int
    score: float
    text: str


class RetrievalOptions(Value):
    """What is done with the lists that a search gives, in this order.

    Args:
        k: passages that a query gets.
        depth: passages that are searched for each query; more where too few are left.
        decontaminate: drop passages that share a run of more than ``run_words`` words with the text
            that is judged, or more than ``jaccard`` of their 13-grams.
        run_words: longest run of words that may be shared.
        dedupe: of passages that share more than ``jaccard`` of their 13-grams, keep the best.
        jaccard: similarity above which passages are the same.
        filters: rules that drop passages.
        share: probability with which a passage is kept, by the hash of its place.
        seed: of that hash.
        rerank: embedder by whose similarity the first ``rerank_depth`` are put in a new order.
        rerank_depth: passages that are reranked.
    """

    k: PositiveInt = 3
    depth: PositiveInt = 1000
    decontaminate: bool = True
    run_words: PositiveInt = 32
    dedupe: bool = True
    jaccard: Annotated[float, Gt(0), Lt(1)] = 0.8
    filters: tuple[Annotated[Choice, Kind("text_filter")], ...] = ()
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    seed: NonNegativeInt = 0
    rerank: Annotated[Choice, Kind("embedder")] | None = None
    rerank_depth: Annotated[int, Ge(1), Le(1000)] = 20

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if self.depth < self.k:
            raise ConfigError(
                f"depth = {self.depth}: fewer passages than k = {self.k}; search at least as many"
            )
        return self


class CorpusCounts(NamedTuple):
    """What scores need to know of all shards together.

    Args:
        passages: how many.
        words: of all passages, as the index counts them.
    """

    passages: int
    words: int


class BuiltPassageIndex(Protocol):
    """The index of one shard."""

    def frequencies(self, texts: Sequence[str]) -> np.ndarray:
        """Passages of this shard that have each word of some texts, int64 [words].

        The words are in an order that only the texts decide; empty where scores need no counts.
        """

    def search(
        self, texts: Sequence[str], k: int, counts: CorpusCounts, frequencies: np.ndarray
    ) -> RankedLists:
        """The best passages of the shard; equal ones by their number.

        Args:
            texts: Q queries.
            k: of each.
            counts: of all shards.
            frequencies: :meth:`frequencies`, summed over all shards.

        Returns:
            Ids are places in the shard, [Q, min(k, passages of the shard)].
        """


@runtime_checkable
class PassageIndex(Protocol):
    """A way to find passages: a part of kind ``passage_index``."""

    def growth(self, small: int, large: int) -> IndexGrowth:
        """How costs grow from one number of passages to another."""

    def build(self, texts: Sequence[str], place: Path, *, seed: int, threads: int) -> int:
        """Index the passages of a shard and write files whose names begin with ``place``.

        Args:
            texts: of the passages.
            place: directory and beginning of the names.
            seed: of what is random.
            threads: of this process.

        Returns:
            Words of the passages, as the index counts them; 0 if it does not.

        Raises:
            ShoalError: they cannot be indexed.
        """

    def open(self, place: Path, *, threads: int) -> BuiltPassageIndex:
        """The index that :meth:`build` has written.

        Raises:
            ShoalError: a file is missing or damaged.
        """


def best_of(ids: Any, scores: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of one query, the best first, equal ones by their number.

    Args:
        ids: int64 [n].
        scores: float64 [n].
        k: at most so many.
    """
    if len(ids) > k:  # ties at the edge stay until they are sorted
        edge = np.partition(scores, len(scores) - k)[len(scores) - k]
        ids, scores = ids[scores >= edge], scores[scores >= edge]
    order = np.lexsort((ids, -scores))[:k]
    return ids[order], scores[order]


def padded(rows: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> RankedLists:
    """Lists of several queries.

    Args:
        rows: ids and scores of each.
        k: places of each.
    """
    ids = np.full((len(rows), k), -1, np.int64)
    scores = np.full((len(rows), k), -np.inf)
    for at, (some, of) in enumerate(rows):
        ids[at, : len(some)], scores[at, : len(some)] = some[:k], of[:k]
    return RankedLists(ids, scores)
