"""The search method ``hybrid``: rankings by vectors and by words, fused by their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.collections import ScoredPoint
from shoal.fields.retrieve.search.dense import DenseVectors
from shoal.fields.retrieve.search.lexical import Lexical
from shoal.fields.retrieve.search.protocols import Searchable, SearchQuery, SearchWork
from shoal.fields.retrieve.search.rates import SearchRates


def fused(rankings: Sequence[Sequence[ScoredPoint]], k: int, smoothing: int) -> list[ScoredPoint]:
    """Reciprocal rank fusion: the score of a point is the sum of ``1 / (smoothing + rank)``.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion outperforms Condorcet and
    individual Rank Learning Methods, 2009.

    Args:
        rankings: each the best first; ranks begin with 1.
        k: at most so many.
        smoothing: the paper's k.
    """
    scores: dict[int, float] = {}
    points: dict[int, ScoredPoint] = {}
    for ranking in rankings:
        for rank, one in enumerate(ranking, 1):
            scores[one.id] = scores.get(one.id, 0.0) + 1 / (smoothing + rank)
            points[one.id] = one
    best = sorted(scores, key=lambda one: (-scores[one], one))[:k]
    return [ScoredPoint(id=one, score=scores[one], payload=points[one].payload) for one in best]


@part
class Hybrid:
    """Vectors and words, fused by reciprocal ranks.

    Source: Cormack, Clarke and Büttcher, Reciprocal Rank Fusion, 2009.

    Args:
        smoothing: the k of the paper.
        depth: points of each ranking that are fused, at least as many as are wanted.
    """

    smoothing: Annotated[int, Ge(0), Le(1_000_000)] = 60
    depth: Annotated[int, Ge(1), Le(10_000)] = 100

    def rank(self, points: Searchable, query: SearchQuery, k: int) -> list[ScoredPoint]:
        depth = max(k, self.depth)
        both = [points.nearest(query, depth), points.matching(query, depth)]
        return fused(both, k, self.smoothing)

    def query_s(self, rates: SearchRates, work: SearchWork) -> float:
        """Both, one after the other."""
        deeper = replace(work, k=max(work.k, self.depth))
        return DenseVectors().query_s(rates, deeper) + Lexical().query_s(rates, deeper)
