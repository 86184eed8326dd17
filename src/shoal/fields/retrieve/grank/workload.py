"""Simulated users: groups with interests, queries from titles, clicks that depend on the place.

A user wants a document, mostly one of the group's, the popular ones more often, and types a word or
two of its title. The list is read from the top (cascade): each place is reached less often than the
one before; the wanted document is mostly clicked, others of the group sometimes, the rest rarely.

Source: Craswell et al., An Experimental Comparison of Click Position-Bias Models, 2008.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.random import generator, seed64
from shoal.fields.retrieve.grank.documents import DocumentSet
from shoal.fields.retrieve.grank.protocols import RetrieveError
from shoal.fields.retrieve.grank.text import terms

_ABROAD, _GO_ON, _WANTED, _GROUP, _OTHER = 0.1, 0.85, 0.9, 0.1, 0.02
# Words of titles that nobody searches for.
_STOP = frozenset(("and", "for", "from", "into", "that", "the", "this", "with", "your"))


class Wish(NamedTuple):
    """What a user wants.

    Args:
        query: what is typed.
        item: the document that is wanted.
    """

    query: str
    item: str


class Users:
    """Users of several interest groups.

    Args:
        documents: what they search.
        count: users; the groups in turn.
        groups: clusters of the documents by their words.
        seed: of everything that is drawn.

    Raises:
        RetrieveError: there are fewer documents than would make up the groups.
    """

    def __init__(self, documents: DocumentSet, count: int, groups: int, seed: int) -> None:
        if len(documents) < 5 * groups:
            raise RetrieveError(
                f"users: {len(documents)} documents for {groups} groups; expected 5 for each"
            )
        self.items, self.count, self.seed = list(documents.texts), count, seed
        self._titles = {name: self._words(name, title) for name, title in documents.titles.items()}
        self.group_of = _groups(documents, groups, seed)
        draw = generator(seed, purpose="interests")
        self._interest = []
        for group in range(groups):
            own = np.flatnonzero(self.group_of == group)
            share = np.full(len(self.items), _ABROAD / len(self.items))
            ranks = 1.0 / np.arange(1, len(own) + 1)
            share[draw.permutation(own)] += (1 - _ABROAD) * ranks / ranks.sum()
            self._interest.append(share)
        self._at = {name: at for at, name in enumerate(self.items)}

    def group(self, user: int) -> int:
        """The group of a user."""
        return user % len(self._interest)

    def wish(self, user: int, number: int, purpose: str = "wish") -> Wish:
        """What a user wants next; the same for the same number and purpose."""
        draw = generator(self.seed, purpose=purpose, step=number, index=user)
        item = self.items[int(draw.choice(len(self.items), p=self._interest[self.group(user)]))]
        words = self._titles[item]
        some = draw.permutation(len(words))[: int(draw.integers(1, 3))]
        return Wish(" ".join(words[at] for at in sorted(some)), item)

    def clicks(self, user: int, number: int, wish: Wish, shown: Sequence[str]) -> list[str]:
        """What a user clicks in a list."""
        draw = generator(self.seed, purpose="clicks", step=number, index=user)
        result = []
        for item in shown:
            ours = self.group_of[self._at[item]] == self.group(user)
            chance = _WANTED if item == wish.item else _GROUP if ours else _OTHER
            if draw.random() < chance:
                result.append(item)
                if item == wish.item:
                    break
            if draw.random() > _GO_ON:
                break
        return result

    @staticmethod
    def _words(name: str, title: str) -> list[str]:
        """Words of a title without the name: who knows that needs no search."""
        own = set(terms(name))
        words = [one for one in dict.fromkeys(terms(title)) if one not in _STOP | own]
        return [one for one in words if len(one) > 2] or terms(title) or terms(name) or [name]


def _groups(documents: DocumentSet, groups: int, seed: int) -> np.ndarray:
    """The cluster of each document, int64 [N]."""
    text: Any = import_extra(
        "sklearn.feature_extraction.text", extra="fields", purpose="interest groups"
    )
    cluster: Any = import_extra("sklearn.cluster", extra="fields", purpose="interest groups")
    found = text.TfidfVectorizer(stop_words="english", max_features=2000, sublinear_tf=True)
    vectors = found.fit_transform(documents.texts.values())
    state = seed64(0, purpose="interest groups") % 2**32
    labels: np.ndarray = cluster.KMeans(groups, n_init=4, random_state=state).fit_predict(vectors)
    return labels.astype(np.int64)


def mean_of(rows: Sequence[Mapping[str, float]], name: str) -> float:
    """Of one number of many."""
    return float(np.mean([row[name] for row in rows])) if rows else 0.0
