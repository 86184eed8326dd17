"""Steps of decodes with and without guesses, recorded once for each number of requests and rows.

As :mod:`shoal.serve.engine.captured`, for rows of which several are of one request: beside tokens,
places and blocks it is written down whose a row is and what of its tree it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from shoal.ir import Chunk
from shoal.kernel.protocols import Ready
from shoal.kernel.tape import RecordedPass, record
from shoal.model.attention import Mixer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.protocols import TokenTree, branches

# Steps of more rows take so long that asking the kernels is little beside.
_MOST = 64
_ALONE = branches((-1,))


class Recordable(Protocol):
    """A model, as far as a recording asks it."""

    @property
    def weight(self) -> Tensor:
        """The embedding."""

    def through(self, x_ND: Tensor, position_N: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
        """See :meth:`~shoal.model.transformer.Transformer.through`."""

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        """See :meth:`~shoal.model.transformer.Transformer.finished`."""

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Scores [R, V]."""


class TreeRows(NamedTuple):
    """Rows of one request: some or all of a tree, or tokens one after the other.

    Args:
        start: place of the first row's keys and values; the others follow.
        root: place from which on rows see only what is marked for them.
        depth: [rows] how far behind the root each token stands.
        seen: [rows] which places from the root on each sees, a bit each.
        inputs: [I, D] what the last rows feed in the place of their tokens' embeddings.
    """

    tokens: Sequence[int] | np.ndarray
    blocks: Sequence[int]
    start: int
    root: int
    depth: np.ndarray
    seen: np.ndarray
    inputs: Tensor | None = None

    @property
    def stop(self) -> int:
        """The place behind its last row."""
        return self.start + len(self.depth)


class Recording:
    """Buffers of a step of N rows of B requests at fixed addresses, and its tape."""

    def __init__(self, requests: int, rows: int, width: int, like: Tensor) -> None:
        # token, position, slot, length, request, root, seen
        self.fed = torch.zeros(7, rows, dtype=torch.int64)
        self.blocks = torch.zeros(requests, width, dtype=torch.int32)
        self.x_ND = like.new_zeros(rows, like.shape[1])
        self.numbers, self._blocks = self.fed.numpy(), self.blocks.numpy()
        self._held: list[Sequence[int]] = [()] * requests
        self.inputs: list[tuple[slice, Tensor]] = []  # rows that are no tokens
        self.several: Sequence[TreeRows] = ()  # where other code computes what they read
        self.hidden: Tensor | None = None
        self.tape: RecordedPass | None = None

    def write(self, several: Iterable[TreeRows], size: int) -> None:
        """The rows of these requests."""
        numbers, row = self.numbers, 0
        self.inputs = []
        for place, one in enumerate(several):
            last = one.stop
            mine = slice(row, row + len(one.depth))
            numbers[0, mine] = one.tokens
            numbers[1, mine] = one.root + one.depth
            held = one.blocks[: -(-last // size)]
            if held != self._held[place]:
                self._blocks[place, : len(held)] = held
                self._held[place] = held
            at = np.arange(one.start, last)
            numbers[2, mine] = self._blocks[place, at // size].astype(np.int64) * size + at % size
            numbers[3, mine] = last
            numbers[4, mine] = place
            numbers[5, mine] = one.root
            numbers[6, mine] = one.seen
            row = mine.stop
            if one.inputs is not None:
                self.inputs.append((slice(row - len(one.inputs), row), one.inputs))


class Recordings:
    """Steps of a model, one recording for each number of requests and rows.

    Args:
        model: whole, in this process; its weights stay where they are.
        attention: kernel of ``paged_attention`` that reads trees.
        longest: largest number of tokens of a request, draft tokens included.
    """

    def __init__(
        self, model: Recordable, cache: PagedCache, attention: Ready, longest: int
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._weight = model.weight
        self._width = -(-longest // cache.block_size)
        self.known: dict[tuple[int, int], Recording | None] = {}
        self.reasons: dict[tuple[int, int], str] = {}

    def over(self, cache: PagedCache) -> Self:
        """The same for another cache of the model, with nothing recorded yet."""
        return type(self)(self._model, cache, self._attention, self._width * self._cache.block_size)

    def play(self, several: Sequence[TreeRows]) -> tuple[Tensor, Tensor] | None:
        """Hidden states [N, D] and scores [N, V] of these rows, in memory of the recording.

        None where they must be computed as others are: there are many rows, or they are the
        first of their kind.
        """
        rows = sum(len(one.depth) for one in several)
        key = (len(several), rows)
        if rows > _MOST or key in self.reasons:
            return None
        if key not in self.known:
            # The first step of a kind may prepare kernels, which must not be repeated.
            self.known[key] = None
            return None
        recording = self.known[key]
        if recording is None:
            recording = self.known[key] = Recording(len(several), rows, self._width, self._weight)
        self.write(recording, several)
        self._embed(recording)
        tape = recording.tape
        if tape is None:
            logits = self._record(key, recording)
        elif tape.play():
            logits = tape.result
        else:
            return None
        assert recording.hidden is not None
        return recording.hidden, logits

    def _embed(self, recording: Recording) -> None:
        torch.index_select(self._weight, 0, recording.fed[0], out=recording.x_ND)
        for rows, inputs in recording.inputs:
            recording.x_ND[rows] = inputs

    def write(self, recording: Recording, several: Iterable[TreeRows]) -> None:
        """Put these rows where a recording reads them."""
        recording.write(several, self._cache.block_size)

    def mixer(self, recording: Recording, alone: bool) -> Mixer:
        """Attention over the cache, for the rows that stand in a recording.

        Args:
            recording: what the step is about.
            alone: every row is another request's.
        """
        cache, attention = self._cache, self._attention
        _, _, slot_N, length_N, request_N = recording.fed[:5]
        requests_N = None if alone else request_N
        trees = () if alone else (recording.fed[5:],)

        def mixer(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
            cache.write(layer, slot_N, k_NKd, v_NKd)
            out: Tensor = attention(
                q_NHd, *cache.sides(layer), recording.blocks, length_N, requests_N, *trees
            )
            return out

        return mixer

    def _record(self, key: tuple[int, int], recording: Recording) -> Tensor:
        """Compute a step, and keep what was asked if that gives the same again."""
        model = self._model
        mixer = self.mixer(recording, key[0] == key[1])

        def compute() -> Tensor:
            recording.hidden = model.finished(
                *model.through(recording.x_ND, recording.fed[1], mixer)
            )
            return model.logits(recording.hidden)

        result, tape = record(compute)
        if isinstance(tape, str):
            self.reasons[key] = tape
            return result
        computed = result.clone()
        self._embed(recording)
        if tape.play() and torch.equal(result, computed):
            recording.tape = tape
        else:
            self.reasons[key] = "a kernel that is not seen"
        return computed


class CapturedRows(Recordings):
    """Recorded steps of decodes and of the trees under them; see :class:`Recordings`."""

    def __call__(
        self, chunks: Sequence[Chunk], trees: Mapping[str, TokenTree]
    ) -> tuple[Tensor, Tensor, dict[str, int]] | None:
        """Hidden states [N, D], scores [N, V] and the first row of each request.

        None where the step must be computed as others are; so must one that has a prompt.
        """
        rows, first = 0, {}
        several: list[TreeRows] = []
        for chunk in chunks:
            if chunk.length > 1 or not chunk.yields:
                return None
            request, start = chunk.request, chunk.start
            first[request.id] = rows
            tree = trees.get(request.id)
            shape = _ALONE if tree is None else tree.shape
            tokens: Sequence[int] | np.ndarray = request.tokens[start : start + 1]
            inputs = None
            if tree is not None:
                tokens = tree.tokens
                if tree.asking is not None:  # rows without a token
                    tokens, inputs = tokens.clip(0), tree.asking.inputs
            several.append(
                TreeRows(tokens, request.blocks, start, start, shape.depth, shape.seen, inputs)
            )
            rows += len(shape)
        result = self.play(several)
        return None if result is None else (*result, first)
