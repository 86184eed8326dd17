"""Rankers as parts: G-Rank, and what it is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.retrieve.grank.entries import ClickEntry
from shoal.fields.retrieve.grank.protocols import Ranked, Ranking, RetrieveError
from shoal.fields.retrieve.grank.ranking import GRank
from shoal.fields.retrieve.grank.text import BM25, terms

# Seconds of a query whatever its size, of a document that matches, and of a click on it.
_CALL_S, _DOCUMENT_S, _CLICK_S = 2e-5, 6e-7, 1.2e-6
# Share of documents that match a query, and of clicks that lie on them.
_MATCH = 0.25


@part
class ClickRanker:
    """Clicks of people who search and click alike, with text and popularity beside them.

    Args:
        floor: what a stranger's click counts.
        prior_weight: of text and popularity.
        top_terms: query terms of a peer that are compared.
    """

    floor: Annotated[float, Ge(0)] = 0.05
    prior_weight: Annotated[float, Ge(0)] = 1.0
    top_terms: Annotated[int, Ge(1)] = 5

    def start(self, documents: Mapping[str, str], me: str) -> Ranking:
        """With no clicks."""
        return GRank(
            documents,
            me,
            floor=self.floor,
            prior_weight=self.prior_weight,
            top_terms=self.top_terms,
        )

    def query_s(self, documents: int, clicks: int) -> float:
        """Documents that match, and the clicks on them."""
        return _CALL_S + _MATCH * (4 * _DOCUMENT_S * documents + _CLICK_S * clicks)


class _Plain:
    """A ranking by one score."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        self.documents = documents
        self.text = BM25(documents)

    def add(self, entry: ClickEntry) -> None:
        """Nothing changes."""

    def remove(self, entry: ClickEntry) -> None:
        """Nothing changes."""

    def score(self, item: str, matches: Mapping[str, float]) -> tuple[float, float]:
        """What decides, and what decides among equals."""
        return matches.get(item, 0.0), 0.0

    def rank(
        self, query: str, candidates: Sequence[str] | None = None, limit: int = 10
    ) -> list[Ranked]:
        """The best documents, the best first; equal ones in the order of their names."""
        if not terms(query):
            raise RetrieveError(f"query {query[:40]!r}: no terms; give at least one word")
        matches = self.text.scores(query)
        chosen = list(matches) if candidates is None else list(dict.fromkeys(candidates))
        unknown = next((one for one in chosen if one not in self.documents), None)
        if unknown is not None:
            raise RetrieveError(f"candidates: {unknown!r} is no document of this peer")
        scores = {item: self.score(item, matches) for item in chosen}
        order = sorted(scores, key=lambda item: (-scores[item][0], -scores[item][1], item))
        return [Ranked(item, scores[item][0]) for item in order[:limit]]


class _Popular(_Plain):
    """A ranking by clicks, of documents that match."""

    def __init__(self, documents: Mapping[str, str]) -> None:
        super().__init__(documents)
        self.clicks: Counter[str] = Counter()

    def add(self, entry: ClickEntry) -> None:
        self.clicks[entry.item] += 1

    def remove(self, entry: ClickEntry) -> None:
        self.clicks[entry.item] -= 1

    def score(self, item: str, matches: Mapping[str, float]) -> tuple[float, float]:
        """Clicks, then text."""
        return math.log1p(self.clicks[item]), matches.get(item, 0.0)


@part
class TextRanker:
    """BM25: text alone; no click changes it."""

    def start(self, documents: Mapping[str, str], me: str) -> Ranking:
        return _Plain(documents)

    def query_s(self, documents: int, clicks: int) -> float:
        """Documents that match."""
        return _CALL_S + _MATCH * 2 * _DOCUMENT_S * documents


@part
class PopularityRanker:
    """Documents that match, by how often all peers have clicked them."""

    def start(self, documents: Mapping[str, str], me: str) -> Ranking:
        return _Popular(documents)

    def query_s(self, documents: int, clicks: int) -> float:
        """Documents that match."""
        return _CALL_S + _MATCH * 3 * _DOCUMENT_S * documents
