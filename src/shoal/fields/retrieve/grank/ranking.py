"""G-Rank: documents that were clicked by people who search and click like me come first.

The score of document d for peer u and query q is the sum over peers v of (s(u, v) + F) n_v(d, q),
and a prior of text and popularity. s is in units of s(u, u), the largest, so that clicks of a peer
who is just like u count as much as the best match of the text. n_v adds up v's clicks on d, each
weighted by the terms that its query shares with q (Jaccard), and is at most 1, so a peer that
clicks often counts once. All counts change with one entry at a time.

Source: Gold and Pouwelse, G-Rank: Unsupervised Continuous Learn-to-Rank for Edge Devices in a P2P
Network, 2023.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.fields.retrieve.grank.entries import ClickEntry
from shoal.fields.retrieve.grank.protocols import (
    Ranked,
    RetrieveError,
    Similarity,
    Tokens,
    Trust,
)
from shoal.fields.retrieve.grank.text import BM25, terms

# Documents by their text, and by clicks, that are ranked where no candidates are given.
_CANDIDATES = 100


def agreement(
    mine: frozenset[str], theirs: frozenset[str], common: int, own: int, other: int
) -> float:
    """Common top terms and the square of common items, over the items of both; 0 if there are none.

    Args:
        mine: top query terms of u.
        theirs: top query terms of v.
        common: items that both clicked.
        own: items that u clicked.
        other: items that v clicked.
    """
    either = own + other - common
    return (len(mine & theirs) + common**2) / either if either else 0.0


def everyone(peer: str) -> float:
    """Trust all peers alike."""
    return 1.0


class _PeerCounts:
    """What one peer has searched and clicked."""

    __slots__ = ("_top", "common", "items", "terms")

    def __init__(self) -> None:
        self.terms: Counter[str] = Counter()
        self.items: Counter[str] = Counter()
        self.common = 0
        self._top: frozenset[str] | None = None

    def top(self, count: int) -> frozenset[str]:
        """The terms it uses most; equal ones in the order of the alphabet."""
        if self._top is None:
            best = sorted(self.terms, key=lambda term: (-self.terms[term], term))
            self._top = frozenset(best[:count])
        return self._top

    def changed(self) -> None:
        """The top terms may be others now."""
        self._top = None


class GRank:
    """Ranks the documents of a peer by the clicks that it knows.

    Args:
        documents: name -> text.
        me: the peer that searches, as its entries name it.
        floor: what a stranger's click counts, F.
        prior_weight: of the prior, in which the best match of the text counts 1.
        top_terms: terms of a peer that are compared.
        similarity: of two peers.
        trust: factor of each peer.
        tokens: makes terms of a text.
    """

    def __init__(
        self,
        documents: Mapping[str, str],
        me: str = "",
        *,
        floor: float = 0.05,
        prior_weight: float = 1.0,
        top_terms: int = 5,
        similarity: Similarity = agreement,
        trust: Trust = everyone,
        tokens: Tokens = terms,
    ) -> None:
        self.me, self.floor, self.prior_weight = me, floor, prior_weight
        self.top_terms, self.similarity, self.trust = top_terms, similarity, trust
        self.known, self.tokens = frozenset(documents), tokens
        self.text = BM25(documents, tokens)
        self._peers: dict[str, _PeerCounts] = {me: _PeerCounts()}
        # Document -> peer -> terms of a query -> clicks.
        self._clicks: dict[str, dict[str, Counter[frozenset[str]]]] = {}
        # Term of a query -> documents clicked under it.
        self._under: dict[str, Counter[str]] = {}
        self._most = 1

    def add(self, entry: ClickEntry) -> None:
        """Count a click."""
        self._count(entry, 1)

    def remove(self, entry: ClickEntry) -> None:
        """Count it no more."""
        self._count(entry, -1)

    def _count(self, entry: ClickEntry, by: int) -> None:
        item, words = entry.item, frozenset(self.tokens(entry.query))
        peer = self._peers.setdefault(entry.peer, _PeerCounts())
        was = item in peer.items
        _bump(peer.items, item, by)
        for word in words:
            _bump(peer.terms, word, by)
            under = self._under.setdefault(word, Counter())
            _bump(under, item, by)
        peer.changed()
        clickers = self._clicks.setdefault(item, {})
        _bump(clickers.setdefault(entry.peer, Counter()), words, by)
        if not clickers[entry.peer]:
            del clickers[entry.peer]
        if (item in peer.items) != was:
            self._meet(entry.peer, item, by)

    def _meet(self, name: str, item: str, by: int) -> None:
        """A peer has clicked an item for the first time, or no click on it is left."""
        mine = self._peers[self.me]
        if name != self.me:
            self._peers[name].common += by * (item in mine.items)
            return
        for other in self._clicks.get(item, {}):
            if other != self.me:
                self._peers[other].common += by

    def closeness(self, peer: str) -> float:
        """What a click of a peer counts: its similarity, from 0 to 1, and the floor."""
        own = self.peer_similarity(self.me)
        share = min(1.0, self.peer_similarity(peer) / own) if own else 0.0
        return self.trust(peer) * (share + self.floor)

    def peer_similarity(self, peer: str) -> float:
        """s(me, peer), of a peer that has clicked or is oneself."""
        mine, other = self._peers[self.me], self._peers[peer]
        common = len(mine.items) if peer == self.me else other.common
        return self.similarity(
            mine.top(self.top_terms),
            other.top(self.top_terms),
            common,
            len(mine.items),
            len(other.items),
        )

    def rank(
        self, query: str, candidates: Sequence[str] | None = None, limit: int = 10
    ) -> list[Ranked]:
        """As :class:`Ranking`; equal documents come in the order of their names."""
        words = frozenset(self.tokens(query))
        matches = self.text.scores(query)
        chosen = self._chosen(query, words, matches, candidates)
        closeness: dict[str, float] = {}
        clicked = {item: self._clicked(item, words, closeness) for item in chosen}
        best = max((matches.get(item, 0.0) for item in chosen), default=0.0) or 1.0
        popular = {item: math.log1p(self._popularity(item)) for item in chosen}
        most = max(popular.values(), default=0.0) or 1.0
        scores = {
            item: clicked[item]
            + self.prior_weight * (matches.get(item, 0.0) / best + 0.1 * popular[item] / most)
            for item in chosen
        }
        order = sorted(scores, key=lambda item: (-scores[item], item))
        return [Ranked(item, scores[item]) for item in order[:limit]]

    def _chosen(
        self,
        query: str,
        words: frozenset[str],
        matches: Mapping[str, float],
        candidates: Sequence[str] | None,
    ) -> Iterable[str]:
        if not words:
            raise RetrieveError(f"query {query[:40]!r}: no terms; give at least one word")
        if candidates is not None:
            unknown = next((one for one in candidates if one not in self.known), None)
            if unknown is not None:
                raise RetrieveError(f"candidates: {unknown!r} is no document of this peer")
            return dict.fromkeys(candidates)
        by_text = sorted(matches, key=lambda item: (-matches[item], item))[:_CANDIDATES]
        under: Counter[str] = Counter()
        for word in words:
            under.update(self._under.get(word, {}))
        by_clicks = sorted(under, key=lambda item: (-under[item], item))[:_CANDIDATES]
        return dict.fromkeys([*by_text, *(one for one in by_clicks if one in self.known)])

    def _clicked(self, item: str, words: frozenset[str], closeness: dict[str, float]) -> float:
        """The sum over peers; ``closeness`` keeps what was computed for this query.

        Sums are exact, so that they are the same in whatever order the entries came.
        """
        total = []
        for peer, queries in self._clicks.get(item, {}).items():
            share = math.fsum(
                count * len(words & other) / len(words | other)
                for other, count in queries.items()
                if not words.isdisjoint(other)
            )
            if share:
                if peer not in closeness:
                    closeness[peer] = self.closeness(peer)
                total.append(closeness[peer] * min(1.0, share))
        return math.fsum(total)

    def _popularity(self, item: str) -> int:
        """Peers that clicked a document."""
        return len(self._clicks.get(item, {}))


def _bump(counts: Counter[Any], key: Any, by: int) -> None:
    counts[key] += by
    if not counts[key]:
        del counts[key]
