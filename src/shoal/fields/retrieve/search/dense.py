"""The search method ``dense``: the points whose vectors are nearest."""

from __future__ import annotations

from shoal.core.parts import part
from shoal.fields.retrieve.collections import ScoredPoint
from shoal.fields.retrieve.collections.collection import EFFORT, TREE_POINTS
from shoal.fields.retrieve.search.protocols import Searchable, SearchQuery, SearchWork
from shoal.fields.retrieve.search.rates import SearchRates

# Entries of lists for each vector that is compared, as Curator has it.
_NEAR = 16


@part
class DenseVectors:
    """Nearest vectors: of a query's vector, or of its text when there is an embedder."""

    def rank(self, points: Searchable, query: SearchQuery, k: int) -> list[ScoredPoint]:
        return points.nearest(query, k)

    def query_s(self, rates: SearchRates, work: SearchWork) -> float:
        """Of a few points all are compared; of many those that short lists name."""
        ranked_s = min(work.k, work.points) * rates.hit_s
        if work.points < TREE_POINTS:
            return ranked_s + work.points * work.dim * rates.compare_s
        compared = min(work.points, EFFORT * work.k)
        listed = min(work.points, _NEAR * EFFORT * work.k)
        return ranked_s + compared * work.dim * rates.compare_s + listed * rates.listed_s
