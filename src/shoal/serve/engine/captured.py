"""Steps in which every request computes one token, recorded once for each number of them.

What changes from step to step, the tokens, their places, and the blocks that they see, is
written to tensors that stay where they are; the kernels of the whole model are then asked by one
call. A recording is believed only if it gives the same bits as the step that it was made of. On a
GPU the recording is a CUDA graph, whose numbers may differ in the last bits: the library may take
another algorithm where its launches are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.traits import traits
from shoal.ir import Chunk
from shoal.kernel import graph, tape
from shoal.kernel.protocols import Ready
from shoal.kernel.tape import RecordedPass
from shoal.model.transformer import Transformer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.engine.hooks import EngineHook, ForwardPass

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder

# Steps of more tokens take so long that asking the kernels is little beside.
_MOST = 64
# A GPU computes even these in less time than its host needs to ask.
_MOST_GPU = 512
# Of the largest score: how far scores may lie apart that were summed in two orders, in bf16.
_CLOSE = 2**-5


class _Inputs:
    """What a step of N single tokens is about, in memory that stays: tokens, places, blocks."""

    def __init__(self, rows: int, width: int, hidden: Tensor) -> None:
        self.x_ND = hidden.new_zeros(rows, hidden.shape[1])
        self._gpu = hidden.is_cuda
        # On a GPU they are written on the host, and copied. Nothing is written while a copy is
        # under way: the tokens of a step are waited for before the next.
        self._host = (
            torch.zeros(4, rows, dtype=torch.int64, pin_memory=self._gpu),
            torch.zeros(rows, width, dtype=torch.int32, pin_memory=self._gpu),
        )
        # [token, position, slot, length], and the blocks
        self.fed, self.blocks = (
            torch.empty_like(x, device=hidden.device) if self._gpu else x for x in self._host
        )
        self._fed, self._blocks = (x.numpy() for x in self._host)
        self._held: list[Sequence[int]] = [()] * rows

    def write(self, chunks: Sequence[Chunk], block_size: int) -> None:
        """The tokens of these requests."""
        columns = []
        for row, chunk in enumerate(chunks):
            first, blocks = chunk.start, chunk.request.blocks
            place, offset = divmod(first, block_size)
            columns.append(
                (chunk.request.tokens[first], first, blocks[place] * block_size + offset, first + 1)
            )
            seen = blocks[: place + 1]
            if seen != self._held[row]:
                self._blocks[row, : len(seen)] = seen
                self._held[row] = seen
        self._fed[:] = np.array(columns, dtype=np.int64).T
        if self._gpu:
            for there, host in zip((self.fed, self.blocks), self._host, strict=True):
                there.copy_(host, non_blocking=True)


class CapturedModel(EngineHook):
    """Scores of single tokens, by recorded steps of a model.

    Args:
        model: whole, in this process; its weights stay where they are.
        cache: its own.
        attention: kernel of ``paged_attention`` for single tokens.
        longest: most tokens of a request.
    """

    kind: ClassVar[str] = "recording"

    def __init__(
        self, model: Transformer, cache: PagedCache, attention: Ready, longest: int
    ) -> None:
        self._model, self._cache, self._attention = model, cache, attention
        self._weight = model.weight  # a look-up of every module is saved in every step
        self._longest = longest
        self._gpu = self._weight.is_cuda
        self._most = _MOST_GPU if self._gpu else _MOST
        self._record_calls: Callable[[Callable[[], Tensor]], tuple[Tensor, RecordedPass | str]] = (
            graph.record if self._gpu else tape.record
        )
        self._forget(0)

    def _forget(self, version: int) -> None:
        """Begin anew, for another version of the weights."""
        self._version = version
        self._seen: set[int] = set()
        self._inputs: dict[int, _Inputs] = {}
        self._tapes: dict[int, RecordedPass] = {}
        self.reasons: dict[int, str] = {}  # why steps of so many tokens are not recorded

    def beside(self, cache: PagedCache) -> CapturedModel:
        """The same for another cache of the model, with nothing recorded yet."""
        return CapturedModel(self._model, cache, self._attention, self._longest)

    def replay(self, work: ForwardPass) -> Tensor | None:
        """Logits [N, V] of the tokens of a pass; None where it must be computed as others are."""
        if work.version != self._version:
            self._forget(work.version)
        chunks = work.chunks
        rows = len(chunks)
        if rows in self.reasons or rows > self._most or chunks[0].stop > self._longest:
            return None
        if any(chunk.length > 1 for chunk in chunks):
            return None
        if rows not in self._seen:
            # The first step of a kind may prepare kernels, which must not be repeated.
            self._seen.add(rows)
            return None
        if rows not in self._inputs:
            width = -(-self._longest // self._cache.block_size)
            self._inputs[rows] = _Inputs(rows, width, self._weight)
        inputs = self._inputs[rows]
        inputs.write(chunks, self._cache.block_size)
        if not self._gpu:  # there it is recorded
            self._embed(inputs)
        recorded = self._tapes.get(rows)
        if recorded is None:
            return self._record(inputs)
        return recorded.result if recorded.play() else None

    def _embed(self, inputs: _Inputs) -> None:
        torch.index_select(self._weight, 0, inputs.fed[0], out=inputs.x_ND)

    def _record(self, inputs: _Inputs) -> Tensor:
        """Compute a step, and keep what was asked if that gives the same again."""
        model, cache = self._model, self._cache
        _, position_N, slots_N, lengths_N = inputs.fed

        def mixer(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
            cache.write(layer, slots_N, k_NKd, v_NKd)
            out: Tensor = self._attention(
                q_NHd, *cache.sides(layer), inputs.blocks, lengths_N, None
            )
            return out

        def compute() -> Tensor:
            if self._gpu:
                self._embed(inputs)
            return model.logits(model.finished(*model.through(inputs.x_ND, position_N, mixer)))

        result, recorded = self._record_calls(compute)
        rows = len(lengths_N)
        if isinstance(recorded, str):
            self.reasons[rows] = recorded
            return result
        computed = result.clone()
        if not self._gpu:
            self._embed(inputs)
        if recorded.play() and _same(recorded.result, computed):
            self._tapes[rows] = recorded
        else:
            self.reasons[rows] = "a kernel that is not seen"
        return computed


def _same(played: Tensor, computed: Tensor) -> bool:
    """Whether a recording gave what the step gave."""
    if not played.is_cuda:
        return torch.equal(played, computed)
    apart = (played.float() - computed.float()).abs().max()
    return bool(apart <= _CLOSE * computed.float().abs().max())


def recordable(built: EngineBuilder) -> Ready | None:
    """The kernel of attention of steps that can be recorded; None where none can."""
    ways = built.model.config.architecture
    # What is recorded has addresses of weights in it: they must stay where they are. Nor does it
    # see which tokens take which route, or know streams that are apart.
    stays = "moves_weights" not in traits("memory", built.job.memory)
    same = not ways.ffn.duo and ways.residual.apart == 1
    return built.attention if stays and same and built.local else None


def captured_of(built: EngineBuilder) -> CapturedModel | None:
    """Of an engine whose model computes all layers here."""
    attention, longest = recordable(built), built.job.max_position
    assert longest is not None
    if attention is None or not built.plain:
        return None
    return CapturedModel(built.model, built.cache, attention, longest)
