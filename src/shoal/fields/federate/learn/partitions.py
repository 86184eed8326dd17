"""Which client has which examples.

Source: Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, 2019 (Dirichlet); Li et al., FedCompass, 2024, section 4 (classes for each
client, dual Dirichlet).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import FederationError


def _shared(examples: Examples, clients: int, seed: int, shares: np.ndarray) -> list[np.ndarray]:
    """Rows of each client.

    Args:
        examples: of all.
        clients: how many.
        seed: of the order of examples.
        shares: [clients, classes]: how much of each class a client gets; columns add up to 1.

    Raises:
        FederationError: a client would have no example.
    """
    draw = generator(seed, purpose="examples of clients")
    rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label in range(examples.classes):
        of_class = draw.permutation(np.flatnonzero(examples.y == label))
        ends = np.round(np.cumsum(shares[:, label]) * len(of_class)).astype(int)
        for client, some in enumerate(np.split(of_class, ends[:-1])):
            rows[client].append(some)
    return checked([np.sort(np.concatenate(parts)) for parts in rows])


def labels_of(examples: Examples) -> np.ndarray:
    """One label for each example, int64 [N].

    Raises:
        FederationError: they are texts, of which every token has one.
    """
    if examples.y.ndim != 1:
        raise FederationError(
            "partition: the examples are texts and have no classes; take natural or iid"
        )
    return examples.y


def checked(rows: list[np.ndarray]) -> list[np.ndarray]:
    """The rows, of which every client has some.

    Raises:
        FederationError: a client has none.
    """
    empty = [at for at, some in enumerate(rows) if not len(some)]
    if empty:
        raise FederationError(
            f"partition: client {empty[0]} of {len(rows)} would have no examples; take fewer "
            "clients, more data, a larger alpha or another seed"
        )
    return rows


@part
class Iid:
    """Examples at random, the same number for each client."""

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """At random."""
        order = generator(seed, purpose="examples of clients").permutation(len(examples))
        return checked([np.sort(some) for some in np.array_split(order, clients)])


@part
class ClassK:
    """Each client has examples of a few classes only.

    Args:
        k: classes of a client.
    """

    k: Annotated[int, Ge(1)] = 2

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """Every class is at some client; those at several are divided at random."""
        labels_of(examples)
        if self.k > examples.classes:
            raise FederationError(
                f"partition: k = {self.k} of {examples.classes} classes; take at most so many"
            )
        if clients * self.k < examples.classes:
            raise FederationError(
                f"partition: {clients} clients with {self.k} classes each do not have all "
                f"{examples.classes}; take more clients or a larger k"
            )
        draw = generator(seed, purpose="classes of clients")
        has = np.zeros((clients, examples.classes), bool)
        # Classes are dealt in shuffled decks, so that each is dealt about as often as any other.
        deck: list[int] = []
        for client in range(clients):
            while has[client].sum() < self.k:
                if all(has[client, label] for label in deck):
                    deck += draw.permutation(examples.classes).tolist()
                at = next(at for at, label in enumerate(deck) if not has[client, label])
                has[client, deck.pop(at)] = True
        shares = has * draw.uniform(0.3, 0.7, has.shape)
        return _shared(examples, clients, seed, shares / shares.sum(0))


@part
class Dirichlet:
    """The classes of each client are drawn from a Dirichlet distribution.

    Args:
        alpha: the smaller, the more the clients differ.
        least: examples that every client has; drawn again until it is so.
    """

    alpha: Annotated[float, Gt(0)] = 0.5
    least: Annotated[int, Ge(1)] = 1

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """Of each class, a drawn share for each client."""
        labels_of(examples)
        draw = generator(seed, purpose="shares of classes")
        for _ in range(100):
            shares = draw.dirichlet(np.full(clients, self.alpha), examples.classes).T
            try:
                rows = _shared(examples, clients, seed, shares)
            except FederationError:
                continue
            if min(map(len, rows)) >= self.least:
                return rows
        raise FederationError(
            f"partition: no draw of dirichlet(alpha={self.alpha}) gives each of {clients} clients "
            f"{self.least} examples; take a larger alpha, fewer clients, or a smaller least"
        )


@part
class DualDirichlet:
    """Sizes of clients and their classes are drawn from two Dirichlet distributions.

    Args:
        sizes: of how many examples a client has.
        classes: of which it has.
    """

    sizes: Annotated[float, Gt(0)] = 4.0
    classes: Annotated[float, Gt(0)] = 0.5

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """Shares follow both draws."""
        draw = generator(seed, purpose="sizes and classes of clients")
        prior = np.bincount(labels_of(examples), minlength=examples.classes) / len(examples)
        for _ in range(100):
            size = draw.dirichlet(np.full(clients, self.sizes))
            mix = draw.dirichlet(prior * self.classes * examples.classes, clients)
            shares = size[:, None] * mix
            try:
                return _shared(examples, clients, seed, shares / shares.sum(0))
            except FederationError:
                continue
        raise FederationError(
            f"partition: no draw gives each of {clients} clients an example; take larger "
            "parameters or fewer clients"
        )


@part
class Natural:
    """Every owner of the data set is a client; owners are joined where there are more of them."""

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """Owners in order, the largest to the client with the fewest examples."""
        if not len(examples.owner):
            raise FederationError(
                "partition: the data has no natural owners; take iid, dirichlet or class_k"
            )
        names, sizes = np.unique(examples.owner, return_counts=True)
        rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
        held = np.zeros(clients, int)
        for at in np.argsort(-sizes, kind="stable"):
            client = int(held.argmin())
            rows[client].append(np.flatnonzero(examples.owner == names[at]))
            held[client] += sizes[at]
        return checked(
            [np.sort(np.concatenate(some)) if some else np.empty(0, int) for some in rows]
        )
