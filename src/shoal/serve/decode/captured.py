"""Steps of decodes with and without guesses, recorded once for each number of requests and rows.

As :mod:`shoal.serve.captured`, for rows of which several are of one request: beside tokens,
places and blocks it is written down whose a row is and what of its tree it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.ir import Chunk
from shoal.kernel.protocols import Ready
from shoal.kernel.tape import Tape, record
from shoal.model.transformer import Transformer
from shoal.serve.cache import PagedCache
from shoal.serve.decode.protocols import TokenTree, branches

__all__ = ["CapturedRows"]

# Steps of more rows take so long that asking the kernels is little beside.
_MOST = 64
_ALONE = branches((-1,))


class _Recording:
    """What a step of N rows of B requests is about, in memory that stays, and its tape."""

    def __init__(self, requests: int, rows: int, width: int, like: Tensor) -> None:
        # token, position, slot, length, request, root, seen
        self.fed = torch.zeros(7, rows, dtype=torch.int64)
        self.blocks = torch.zeros(requests, width, dtype=torch.int32)
        self.x_ND = like.new_zeros(rows, like.shape[1])
        self.numbers, self._blocks = self.fed.numpy(), self.blocks.numpy()
        self._held: list[Sequence[int]] = [()] * requests
        self.inputs: list[tuple[slice, Tensor]] = []  # rows that are no tokens
        self.hidden: Tensor | None = None
        self.tape: Tape | None = None

    def write(self, chunks: Sequence[Chunk], trees: Mapping[str, TokenTree], size: int) -> None:
        """The rows of these requests."""
        numbers, row = self.numbers, 0
        self.inputs = []
        for place, chunk in enumerate(chunks):
            request, start = chunk.request, chunk.start
            tree = trees.get(request.id)
            shape = _ALONE if tree is None else tree.shape
            stop = row + len(shape)
            mine = slice(row, stop)
            if tree is None:
                numbers[0, mine] = request.tokens[start]
            elif tree.asking is None:
                numbers[0, mine] = tree.tokens
            else:
                numbers[0, mine] = tree.tokens.clip(0)
                inputs = tree.asking.inputs
                self.inputs.append((slice(stop - len(inputs), stop), inputs))
            numbers[1, mine] = start + shape.depth
            blocks, last = request.blocks, start + len(shape)
            at = np.arange(start, last)
            held = blocks[: -(-last // size)]
            if held != self._held[place]:
                self._blocks[place, : len(held)] = held
                self._held[place] = held
            numbers[2, mine] = self._blocks[place, at // size].astype(np.int64) * size + at % size
            numbers[3, mine] = last
            numbers[4, mine] = place
            numbers[5, mine] = start
            numbers[6, mine] = shape.seen
            row = stop


class CapturedRows:
    """Hidden states and scores of decodes and of the trees under them, by recorded steps.

    Args:
        model: whole, in this process; its weights stay where they are.
        cache: its own.
        attention: kernel of ``paged_attention`` that reads trees.
        longest: most tokens of a request, guesses included.
    """

    def __init__(
        self, model: Transformer, cache: PagedCache, attention: Ready, longest: int
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._weight = model.weight
        self._width = -(-longest // cache.block_size)
        self._known: dict[tuple[int, int], _Recording | None] = {}
        self.reasons: dict[tuple[int, int], str] = {}

    def over(self, cache: PagedCache) -> CapturedRows:
        """The same for another cache of the model, with nothing recorded yet."""
        return CapturedRows(
            self._model, cache, self._attention, self._width * self._cache.block_size
        )

    def __call__(
        self, chunks: Sequence[Chunk], trees: Mapping[str, TokenTree]
    ) -> tuple[Tensor, Tensor, dict[str, int]] | None:
        """Hidden states [N, D], scores [N, V] and the first row of each request.

        None where the step must be computed as others are: it has a prompt, or many rows, or is
        the first of its kind.
        """
        rows, first = 0, {}
        for chunk in chunks:
            if chunk.length > 1 or not chunk.yields:
                return None
            first[chunk.request.id] = rows
            tree = trees.get(chunk.request.id)
            rows += 1 if tree is None else len(tree.shape)
        key = (len(chunks), rows)
        if rows > _MOST or key in self.reasons:
            return None
        if key not in self._known:
            # The first step of a kind may prepare kernels, which nobody wants repeated.
            self._known[key] = None
            return None
        recording = self._known[key]
        if recording is None:
            recording = self._known[key] = _Recording(len(chunks), rows, self._width, self._weight)
        recording.write(chunks, trees, self._cache.block_size)
        self._embed(recording)
        tape = recording.tape
        if tape is None:
            logits = self._record(key, recording)
        elif tape.play():
            logits = tape.result
        else:
            return None
        assert recording.hidden is not None
        return recording.hidden, logits, first

    def _embed(self, recording: _Recording) -> None:
        torch.index_select(self._weight, 0, recording.fed[0], out=recording.x_ND)
        for rows, inputs in recording.inputs:
            recording.x_ND[rows] = inputs

    def _record(self, key: tuple[int, int], recording: _Recording) -> Tensor:
        """Compute a step, and keep what was asked if that gives the same again."""
        model, cache = self._model, self._cache
        _, position_N, slot_N, length_N, request_N = recording.fed[:5]
        tree_2N = recording.fed[5:]
        requests_N = None if key[0] == key[1] else request_N
        trees = () if requests_N is None else (tree_2N,)

        def mixer(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
            cache.write(layer, slot_N, k_NKd, v_NKd)
            out: Tensor = self._attention(
                q_NHd, *cache.sides(layer), recording.blocks, length_N, requests_N, *trees
            )
            return out

        def compute() -> Tensor:
            recording.hidden = model.finished(*model.through(recording.x_ND, position_N, mixer))
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
