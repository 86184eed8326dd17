"""What rankers promise, and what they are given.

Source: Gold and Pouwelse, G-Rank: Unsupervised Continuous Learn-to-Rank for Edge Devices in a P2P
Network, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from shoal.core.errors import ShoalError
from shoal.fields.retrieve.grank.entries import ClickEntry


class RetrieveError(ShoalError):
    """Documents that cannot be ranked as asked, or a peer that cannot work."""


class Ranked(NamedTuple):
    """A document in its place.

    Args:
        item: its name.
        score: what it is ranked by.
    """

    item: str
    score: float


Similarity = Callable[[frozenset[str], frozenset[str], int, int, int], float]
"""(top terms of u, those of v, items both clicked, items u clicked, items v clicked) -> s(u, v)."""

Trust = Callable[[str], float]
"""Peer -> factor of what it contributes; 0 leaves it out."""

Tokens = Callable[[str], list[str]]
"""Text -> terms."""


class Ranking(Protocol):
    """A ranker at work on the documents of one peer."""

    def add(self, entry: ClickEntry) -> None:
        """A click is new in the log."""

    def remove(self, entry: ClickEntry) -> None:
        """A click has left the log."""

    def rank(
        self, query: str, candidates: Sequence[str] | None = None, limit: int = 10
    ) -> list[Ranked]:
        """The best documents, the best first.

        Args:
            query: text.
            candidates: documents to be ranked; those that match, or were clicked, if not given.
            limit: how many are returned.

        Raises:
            RetrieveError: the query has no terms, or a candidate is unknown.
        """


@runtime_checkable
class Ranker(Protocol):
    """How a peer ranks."""

    def start(self, documents: Mapping[str, str], me: str) -> Ranking:
        """Begin with documents and no clicks.

        Args:
            documents: name -> text.
            me: the peer that ranks.
        """

    def query_s(self, documents: int, clicks: int) -> float:
        """Seconds of a query, predicted for this many documents and clicks in the log."""


@dataclass(frozen=True, kw_only=True)
class GossipSettings:
    """How peers exchange clicks.

    Args:
        period_s: seconds between exchanges that a peer begins.
        newest: own clicks that it sends at most, the newest.
        sample: clicks of others that it sends at most, drawn at random.
        quota: clicks of each peer that are kept, the newest.
        max_age_s: seconds after which a click is dropped.
        skew_s: seconds by which another's clock may be ahead.
    """

    period_s: float = 1.0
    newest: int = 32
    sample: int = 32
    quota: int = 1000
    max_age_s: float = 90 * 86400.0
    skew_s: float = 300.0
