"""Packed sequences of several sources in given ratios, with a state that any ranks go on from.

A run of Shoal needs no such state: its order follows from the seed and the step
(:mod:`~shoal.corpora.order`). This is for what cannot be counted so: documents of any length from
sources that are drawn from at random, packed one after the other.

Every reader draws documents of its share of each source and puts them behind each other until a
sequence is full; what is left begins the next one. Some sequences are read ahead.

Source: Wan et al., ByteCheckpoint, 2024, section 3.3 (what a data loader's state is made of).
Shapes: B sequences of T + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from shoal.checkpoint.loader import LoaderState, ReaderState
from shoal.core.errors import CheckpointError, require
from shoal.core.random import Permutation, generator


class Documents(Protocol):
    """A source: so many documents, each a sequence of tokens."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, number: int, /) -> Sequence[int]:
        """The tokens of one."""


class MixtureLoader:
    """Batches of one rank; save it as ``{"loader": loader}``, and load it on any number of ranks.

    Args:
        sources: name -> documents.
        weights: name -> how often it is drawn from, of their sum; documents, not tokens.
        seq_len: T.
        batch: B, sequences of a batch of this rank.
        seed: of all choices.
        end: token that follows every document.
        rank: this rank.
        world: ranks that share the sources.
        readers: readers of each rank, which take turns.
        ahead: sequences that each reader keeps ready.
    """

    def __init__(
        self,
        sources: Mapping[str, Documents],
        weights: Mapping[str, float],
        *,
        seq_len: int,
        batch: int,
        seed: int,
        end: int,
        rank: int = 0,
        world: int = 1,
        readers: int = 1,
        ahead: int = 1,
    ) -> None:
        require(
            bool(sources) and set(weights) == set(sources),
            "weights",
            sorted(weights),
            expected=f"one for each source: {', '.join(sorted(sources)) or 'none is given'}",
        )
        for name, weight in weights.items():
            require(weight > 0, f"weights.{name}", weight, expected="a number above 0")
        for name, documents in sources.items():
            require(
                len(documents) >= world * readers,
                f"sources.{name}",
                f"{len(documents)} documents",
                expected=f"at least one for each of {world * readers} readers",
            )
        require(0 <= rank < world, "rank", rank, expected=f"0 to {world - 1}")
        for name, value in (("seq_len", seq_len), ("batch", batch), ("readers", readers)):
            require(value >= 1, name, value, expected="at least 1")
        require(ahead >= 0, "ahead", ahead, expected="at least 0")
        self._sources = dict(sources)
        self._names = sorted(sources)
        total = sum(weights.values())
        self._ratios = [weights[name] / total for name in self._names]
        self._seq_len, self._batch, self._ahead = seq_len, batch, ahead
        self._state = LoaderState(
            shared={
                "weights": dict(sorted(weights.items())),
                "seed": seed,
                "seq_len": seq_len,
                "end": end,
            },
            lengths={name: len(sources[name]) for name in self._names},
            readers=world * readers,
            first=rank * readers,
        )
        fresh = ReaderState(
            spans=dict.fromkeys(self._names, ()), epochs=dict.fromkeys(self._names, 0)
        )
        self._own = [fresh] * readers

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """The next batch: int64 [B, T + 1]; there is always one."""
        rows = [self._take(row % len(self._own)) for row in range(self._batch)]
        return np.array(rows, dtype=np.int64)

    def state(self) -> LoaderState:
        """What this rank's readers have left and have begun."""
        return replace(self._state, own=tuple(self._own))

    def load_state(self, state: LoaderState) -> None:
        """Go on where a state was taken.

        Raises:
            CheckpointError: it is of other sources, ratios, lengths or another seed.
        """
        for name in ("shared", "lengths"):
            there, here = getattr(state, name), getattr(self._state, name)
            require(
                there == here,
                f"state of a data loader: {name}",
                there,
                expected=f"{here}, as this loader has it",
                error=CheckpointError,
            )
        smallest = min(state.lengths.values())
        require(
            smallest >= state.readers,
            "readers",
            state.readers,
            expected=f"at most {smallest}, the documents of the smallest source",
            error=CheckpointError,
        )
        self._own = list(state.own)
        self._state = replace(state, own=())

    def _take(self, reader: int) -> tuple[int, ...]:
        while len(self._own[reader].ready) <= self._ahead:
            self._pack(reader)
        first, *others = self._own[reader].ready
        self._own[reader] = replace(self._own[reader], ready=tuple(others))
        return first

    def _pack(self, reader: int) -> None:
        """Fill one sequence more."""
        waiting = list(self._own[reader].packing)
        tokens: list[int] = []
        size = self._seq_len + 1
        while len(tokens) < size:
            tokens += waiting.pop(0) if waiting else self._draw(reader)
        full, rest = tuple(tokens[:size]), tuple(tokens[size:])
        packing = ((rest,) if rest else ()) + tuple(waiting)
        own = self._own[reader]
        self._own[reader] = replace(own, packing=packing, ready=(*own.ready, full))

    def _draw(self, reader: int) -> list[int]:
        """The tokens of the reader's next document."""
        state, one = self._state, self._own[reader]
        seed: Any = state.shared["seed"]
        number = state.first + reader
        draws = generator(
            seed, purpose="mixture", step=one.drawn, layer=state.generation, index=number
        )
        chance = draws.random()
        edges = np.cumsum(self._ratios)
        source = self._names[min(int(np.searchsorted(edges, chance, "right")), len(edges) - 1)]
        spans, epochs = dict(one.spans), dict(one.epochs)
        left = [span for span in spans[source] if len(span)]
        while not left:
            left = [state.share(source, epochs[source], number)]
            epochs[source] += 1
            left = [span for span in left if len(span)]
        head, rest = left[0].cut(1)
        spans[source] = tuple(span for span in (rest, *left[1:]) if len(span))
        self._own[reader] = replace(one, spans=spans, epochs=epochs, drawn=one.drawn + 1)
        return self.document(source, head.epoch, head.start)

    def document(self, source: str, epoch: int, place: int) -> list[int]:
        """The tokens that lie at a place of an epoch of a source, and the end behind them."""
        count = self._state.lengths[source]
        order = Permutation(count, int(self._state.shared["seed"]), epoch)
        tokens = self._sources[source][int(order(np.array([place]))[0])]
        return [*map(int, tokens), int(self._state.shared["end"])]
