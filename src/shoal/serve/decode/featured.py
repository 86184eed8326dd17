"""What a drafter of features keeps of a request: features that are certain, and what it read.

Source: Gao et al., Falcon, 2025, section 3.3; Li et al., EAGLE, 2024, section 4.1.
Shapes: T places, D hidden, L LSTM layers, K key heads, d of a head, k places of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.ir import Request
from shoal.serve.decode.fast_falcon import FastFalcon, Seeing, State
from shoal.serve.decode.protocols import Seen

__all__ = ["Kept", "catch_up"]


class _Read(NamedTuple):
    """The net behind some places: where, its state [L, D] each, and its last outputs [k, D]."""

    places: int
    h: Tensor
    c: Tensor
    outputs: Tensor


class Kept:
    """Of one request.

    Args:
        request: whose.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._forget(0)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def _forget(self, start: int) -> None:
        """Begin at a place as if nothing stood before it: that was in the cache, unseen."""
        self.first = self.known = start
        self.read: _Read | None = None
        self._before: _Read | None = None
        self._features: list[Tensor] = []
        self._tokens: list[int] = []

    def learn(self, seen: Seen) -> None:
        """Features of places that are certain, each with the token one place further."""
        assert seen.hidden is not None
        start = seen.start
        if start != self.known:
            before = self._before
            self._forget(start) if before is None or before.places != start else self._back(before)
        stop = start + len(seen.tokens)
        last = seen.root if seen.root is not None else self.request.tokens[stop]
        self._features.append(seen.hidden.clone())
        self._tokens += [*seen.tokens[1:], last]
        self.known = stop

    def _back(self, read: _Read) -> None:
        self.known, self.read = read.places, read
        self._features, self._tokens = [], []

    def unread(self, like: Tensor) -> tuple[Tensor, list[int]]:
        """Features and tokens that the net has not read."""
        features, tokens = self._features, self._tokens
        self._features, self._tokens = [], []
        return (torch.cat(features) if features else like[:0]), tokens

    def reached(self, state: State, number: int, outputs: Tensor) -> None:
        """The net has read everything; what it may have to go back to is where it was."""
        self._before = self.read
        self.read = _Read(self.known, state.h[:, number], state.c[:, number], outputs)

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values [T, K, d] of the places that were read."""
        assert self._keys is not None and self._values is not None
        length = self.known - self.first
        return self._keys[:length], self._values[:length]

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Keys and values of the last places."""
        stop = self.known - self.first
        if self._keys is None or self._values is None or stop > len(self._keys):
            room = max(256, 2 * stop)
            grown = [one.new_empty(room, *one.shape[1:]) for one in (keys, values)]
            if self._keys is not None and self._values is not None:
                for new, old in zip(grown, (self._keys, self._values), strict=True):
                    new[: len(old)] = old
            self._keys, self._values = grown
        self._keys[stop - len(keys) : stop] = keys
        self._values[stop - len(keys) : stop] = values


def catch_up(net: FastFalcon, embed_VD: Tensor, known: list[Kept]) -> tuple[Tensor, State]:
    """Read what is certain and new: the next k features of every request [G, k, D].

    Args:
        net: the net.
        embed_VD: the target's embedding.
        known: of the requests; each has k places at least.
    """
    fresh = [one.unread(embed_VD) for one in known]
    lengths = [len(tokens) for _, tokens in fresh]
    order = sorted(range(len(known)), key=lambda place: -lengths[place])
    longest = lengths[order[0]]
    x = embed_VD.new_zeros(len(known), longest, 2 * embed_VD.shape[1])
    width = embed_VD.shape[1]
    before = net.begin(len(known))
    for row, place in enumerate(order):
        features, tokens = fresh[place]
        if tokens:
            ids = torch.tensor(tokens, device=embed_VD.device)
            x[row, : len(tokens), :width] = features
            x[row, : len(tokens), width:] = embed_VD[ids]
        read = known[place].read
        if read is not None:
            before.h[:, row], before.c[:, row] = read.h, read.c
    out, state = net.mixed(x, before, [lengths[place] for place in order])
    rows: list[Tensor] = []
    seeing: list[Seeing] = []
    positions: list[int] = []
    begin = 0
    for row, place in enumerate(order):
        one = known[place]
        new = out[row, : lengths[place]]
        missing = net.k - len(new)
        if missing > 0 and one.read is not None:
            new = torch.cat((one.read.outputs[-missing:], new))
        first = one.known - one.first - len(new)
        keys, values = one.held() if first else (new[:0].view(0, *net.heads),) * 2
        seeing.append(Seeing(begin, begin + len(new), net.k, keys[:first], values[:first], None))
        rows.append(new)
        positions += range(one.known - len(new), one.known)
        begin += len(new)
        one.reached(state, row, new[-net.k :].clone())
    place_R = torch.tensor(positions, device=embed_VD.device)
    features, keys, values = net.seen(torch.cat(rows), place_R, seeing)
    for own, place in zip(seeing, order, strict=True):
        known[place].write(keys[own.first : own.stop], values[own.first : own.stop])
    back = [order.index(place) for place in range(len(known))]
    features = features.view(len(known), net.k, width)[back]
    return features, State(state.h[:, back], state.c[:, back])
