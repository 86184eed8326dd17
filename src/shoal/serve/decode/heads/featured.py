"""What a drafter of features keeps of a request: features that are certain, and what it read.

Places are counted from the first that was seen: rotations show how far apart two places are, and
not where they stand.

Source: Gao et al., Falcon, 2025, section 3.3; Li et al., EAGLE, 2024, section 4.1.
Shapes: E requests, T places, D hidden, L LSTM layers, k places of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.ir import MAX_NODES, Request
from shoal.serve.decode.captured import TreeRows
from shoal.serve.decode.falcon.fast import FalconInput, FalconOutput, FalconState, FastFalcon
from shoal.serve.decode.protocols import AcceptedTokens


class _Read(NamedTuple):
    """The net behind some places: where, its state [L, D] each, and its last outputs [k, D]."""

    places: int
    h: Tensor
    c: Tensor
    outputs: Tensor


class FeatureState:
    """Of one request; its keys and values are in the net's cache.

    Attributes:
        blocks: of the net's cache.
        first: place of the request that was seen first.
        known: the place behind those that are certain.
        read: the net behind all of them that it has read.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: list[int] = []
        self._begin(0)

    def _begin(self, start: int) -> None:
        """Begin at a place as if nothing stood before it: that was in the cache, unseen."""
        self.first = self.known = start
        self.read: _Read | None = None
        self._before: _Read | None = None
        self._features: list[Tensor] = []
        self._tokens: list[int] = []

    def forget(self) -> None:
        self.blocks = []
        self._begin(self.known)

    @property
    def length(self) -> int:
        """Places that are certain."""
        return self.known - self.first

    def learn(self, seen: AcceptedTokens) -> None:
        """Features of places that are certain, each with the token one place further."""
        assert seen.hidden is not None
        start = seen.start
        if start != self.known:
            before = self._before
            self._begin(start) if before is None or before.places != start else self._back(before)
        stop = start + len(seen.tokens)
        last = seen.root if seen.root is not None else self.request.tokens[stop]
        self._features.append(seen.hidden.clone())
        self._tokens += [*seen.tokens[1:], last]
        self.known = stop

    def _back(self, read: _Read) -> None:
        self.known, self.read = read.places, read
        self._features, self._tokens = [], []

    def pending_inputs(self, embed_VD: Tensor) -> Tensor:
        """Features of what the net has not read, and embeddings of the tokens [T, 2 D]."""
        features, tokens = self._features, self._tokens
        if not tokens:
            return embed_VD.new_empty(0, 2 * embed_VD.shape[1])
        self._features, self._tokens = [], []
        said = embed_VD[torch.tensor(tokens, device=embed_VD.device)]
        whole = features[0] if len(features) == 1 else torch.cat(features)
        return torch.cat((whole, said), 1)

    def reached(self, h: Tensor, c: Tensor, outputs: Tensor) -> None:
        """The net has read everything; what it may have to go back to is where it was."""
        self._before = self.read
        self.read = _Read(self.known, h.clone(), c.clone(), outputs.clone())


def reading(net: FastFalcon, known: Sequence[FeatureState]) -> tuple[FalconInput, list[int]]:
    """What is certain and new of some requests, and which of them comes when.

    Args:
        net: the net.
        known: of the requests; each has k places at least, and blocks for all.
    """
    fresh = [one.pending_inputs(net.weight) for one in known]
    order = sorted(range(len(known)), key=lambda place: -len(fresh[place]))
    lengths = [len(fresh[place]) for place in order]
    reads = [known[place].read for place in order]
    before = net.begin(len(known))
    for row, read in enumerate(reads):
        if read is not None:
            before.h[:, row], before.c[:, row] = read.h, read.c
    if len(set(lengths)) == 1:
        x_ETX = torch.stack([fresh[place] for place in order])
    else:
        x_ETX = torch.nn.utils.rnn.pad_sequence([fresh[place] for place in order], True)
    # The last k places see each other, so some are read once more where fewer are new.
    missing = max(0, net.k - lengths[-1])
    earlier = None
    if missing:
        empty = net.weight.new_zeros(net.k, net.weight.shape[1])
        earlier = torch.stack([(empty if one is None else one.outputs)[-missing:] for one in reads])
    branches = [
        _certain(known[place], length + missing)
        for place, length in zip(order, lengths, strict=True)
    ]
    return FalconInput(x_ETX, lengths, before, earlier, branches, True), order


def _certain(kept: FeatureState, rows: int) -> TreeRows:
    """The last rows of what is certain, all of which may see all."""
    start = kept.length - rows
    seen = np.full(rows, (1 << min(rows, MAX_NODES)) - 1)
    return TreeRows((0,) * rows, kept.blocks, start, start, np.arange(rows), seen)


def reached(
    made: FalconOutput, reading: FalconInput, known: Sequence[FeatureState], order: Sequence[int]
) -> FalconOutput:
    """Keep what was read; features, scores and state in the order of ``known``."""
    missing = 0 if reading.earlier is None else reading.earlier.shape[1]
    k = made.features.shape[1]
    for row, place in enumerate(order):
        stop = missing + reading.lengths[row]
        known[place].reached(
            made.state.h[:, row], made.state.c[:, row], made.outputs[row, stop - k : stop]
        )
    if list(order) == list(range(len(order))):
        return made
    back = [list(order).index(place) for place in range(len(known))]
    state = FalconState(made.state.h[:, back], made.state.c[:, back])
    return made._replace(features=made.features[back], logits=made.logits[back], state=state)
