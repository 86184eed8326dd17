"""The search method ``bm25``: the points whose text has the words."""

from __future__ import annotations

from shoal.core.parts import part
from shoal.fields.retrieve.collections import ScoredPoint
from shoal.fields.retrieve.search.protocols import Searchable, SearchQuery, SearchWork
from shoal.fields.retrieve.search.rates import SearchRates


@part
class Lexical:
    """BM25 over the text attribute of a collection.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009.
    """

    def rank(self, points: Searchable, query: SearchQuery, k: int) -> list[ScoredPoint]:
        return points.matching(query, k)

    def query_s(self, rates: SearchRates, work: SearchWork) -> float:
        """Every document that has a word of the query gets a score."""
        ranked = min(work.k, work.postings)
        return work.postings * rates.posting_s + ranked * rates.hit_s
