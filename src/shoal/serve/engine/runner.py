"""A model on this machine, executing the steps of a scheduler.

All tokens of a step lie side by side in one vector, each with its position and its slot
in the cache: linear layers see no padding, and a step may mix decodes with parts of
prompts as it likes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.ir import Chunk, Request, Step, StepResult
from shoal.kernel.protocols import Ready
from shoal.model.attention import Mixer
from shoal.model.config import ModelConfig
from shoal.model.duo import computing
from shoal.model.parscale import computing as streaming
from shoal.model.parscale import prefixes
from shoal.model.transformer import Transformer
from shoal.serve.adapters.loaded import AdapterBank
from shoal.serve.cache.attention import Context, PagedAttention
from shoal.serve.cache.host import Mover
from shoal.serve.cache.paged import PagedCache
from shoal.serve.engine.adjust import Adjuster
from shoal.serve.engine.captured import Captured
from shoal.serve.engine.choosing import NOT_FINITE, choose_rows
from shoal.serve.engine.failure import errors_of_step
from shoal.serve.engine.pooling import Pooler

if TYPE_CHECKING:
    from shoal.serve.decode.protocols import TokenTree

__all__ = ["FlatModel", "LocalRunner", "Rows", "slots"]


class FlatModel(Protocol):
    """What computes tokens side by side: a model, or the part of one that this process has."""

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        ...

    @property
    def weight(self) -> Tensor:
        """A weight: of the dtype and on the device of all."""
        ...

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor | None:
        """See :meth:`~shoal.model.transformer.Transformer.flat`; None if others go on with it."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor | None:
        """Scores [R, V]; None if others choose by them."""
        ...


class Rows:
    """The tokens of a step side by side: what they are, where they stand and where they go.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._token: list[int] = []
        self._position: list[int] = []
        self._slot: list[int] = []
        self.last: list[int] = []  # of every chunk: the row of its last token
        self.contexts: list[Context] = []

    def add(self, chunk: Chunk) -> None:
        """The tokens of a chunk."""
        request, first, stop = chunk.request, chunk.start, chunk.stop
        size, blocks = self._size, request.blocks
        if chunk.length == 1:
            self._token.append(request.tokens[first])
            self._position.append(first)
            self._slot.append(blocks[first // size] * size + first % size)
        else:
            self._token += request.tokens[first:stop]
            self._position += range(first, stop)
            self._slot += slots(blocks, range(first, stop), size)
        self.last.append(len(self._token) - 1)
        virtual = request.params.streams != 1
        self.contexts.append(Context(first, chunk.length, blocks, virtual=virtual))

    def add_tree(self, chunk: Chunk, tree: TokenTree) -> None:
        """Root and nodes: each has the place of its depth, and a slot of its own."""
        first, rows = chunk.start, len(tree.shape)
        self._token += tree.tokens.clip(0).tolist()
        self._position += (first + tree.shape.depth).tolist()
        self._slot += slots(chunk.request.blocks, range(first, first + rows), self._size)
        self.last.append(len(self._token) - 1)
        self.contexts.append(Context(first, rows, chunk.request.blocks, tree.shape.seen))

    def fed(self, device: torch.device) -> Tensor:
        """Tokens, positions and slots [3, N]."""
        columns = (self._token, self._position, self._slot)
        return torch.from_numpy(np.array(columns, dtype=np.int64)).to(device)


def slots(blocks: Sequence[int], places: Iterable[int], size: int) -> list[int]:
    """Where tokens at these places lie in the cache."""
    return [blocks[place // size] * size + place % size for place in places]


class LocalRunner:
    """Computes steps with a model and a paged cache of one device.

    Args:
        model: computes in the dtype of its weights, where they are.
        cache: of the same dtype and device.
        attention: kernel of ``paged_attention`` for this cache; pages are copied without one.
        prompts: the same for chunks of prompts; they are computed one by one without.
        exact: what a request gets does not depend on what else a step computes, bit for bit.
        adjust: changes scores before tokens are chosen by them.
        mover: of blocks between cache and host; steps without transfers need none.
        captured: computes steps of single tokens; they are computed as others are without.
        adapters: of the model; requests for none of them are computed without.
        clock: s, for the duration of a step.

    Raises:
        ServeError: model and cache do not go together.
    """

    def __init__(
        self,
        model: FlatModel,
        cache: PagedCache,
        *,
        attention: Ready | None = None,
        prompts: Ready | None = None,
        exact: bool = False,
        adjust: Adjuster | None = None,
        mover: Mover | None = None,
        captured: Captured | None = None,
        adapters: AdapterBank | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        weight = model.weight
        require(
            weight.dtype == cache.dtype and weight.device.type == cache.device.type,
            "cache",
            f"{cache.dtype} on {cache.device}",
            expected=f"that of the model, {weight.dtype} on {weight.device}",
            error=ServeError,
        )
        self.model, self.cache = model, cache
        self.mover, self._captured = mover, captured
        self._adapters = adapters
        # Others compute parts of the same step: one that fails here leaves them waiting.
        self.shared = False
        self._recorded_of: str | None = None  # the adapter that was merged in what was recorded
        self.attention, self.prompts, self._exact = attention, prompts, exact
        self._ffn = model.config.architecture.ffn
        self._prefix = prefixes(model) if model.config.architecture.streams.num > 1 else None
        self._clock = clock
        self._adjust = adjust or Adjuster()
        self._pooler = Pooler()

    def beside(
        self, cache: PagedCache, *, clock: Callable[[], float] = time.perf_counter
    ) -> LocalRunner:
        """One that computes in the same way, on another cache of the same form."""
        captured = None if self._captured is None else self._captured.over(cache)
        return LocalRunner(
            self.model,
            cache,
            attention=self.attention,
            prompts=self.prompts,
            exact=self._exact,
            captured=captured,
            adapters=self._adapters,
            clock=clock,
        )

    def execute(self, step: Step) -> StepResult:
        """Compute a step; its keys and values go to the blocks of its requests.

        Raises:
            ServeError: a request holds too few blocks for its tokens, or a transfer failed.
        """
        start = self._clock()
        self._move(step)
        if not step.chunks:
            return StepResult({}, seconds=self._clock() - start, done=self._over())
        with torch.inference_mode():
            self.cache.clear(step.scrub)
            self.cache.move(step.moves)
            result = self._compute(step) if self.shared else self._contained(step)
        return replace(result, seconds=self._clock() - start, done=self._over())

    def _contained(self, step: Step) -> StepResult:
        """Compute a step; what nobody foresaw ends its requests, and nothing else.

        Nothing of the step was taken into any books yet, so the blocks of its requests are given
        back as those of any that is aborted.

        Raises:
            ServeError: who else computes is gone, or the books are wrong: nothing can go on.
            RuntimeError: the device does not work any more.
        """
        try:
            return self._compute(step)
        except ServeError:
            raise
        except Exception as cause:
            return StepResult({}, errors=errors_of_step(step.chunks, cause, self.cache.device))

    def _move(self, step: Step) -> None:
        """Begin the transfers of a step, and wait for what it waits for."""
        if not (step.transfers or step.wait_for):
            return
        if self.mover is None:
            raise ServeError(
                "the step copies blocks, and this runner has nobody who does; give it a mover"
            )
        self.mover.begin(step.transfers)
        self.mover.wait(step.wait_for, first=not step.chunks)

    def _over(self) -> frozenset[int]:
        return self.mover.over() if self.mover is not None else frozenset()

    def _compute(self, step: Step) -> StepResult:
        # Single tokens first and longest context first, as attention wants them.
        chunks = sorted(step.chunks, key=lambda chunk: (chunk.length > 1, -chunk.stop))
        for chunk in chunks:
            self._check(chunk)
        adapted = self._adapters is not None and self._adapters.begin(chunks)
        if self._adapters is not None and self._adapters.merged != self._recorded_of:
            self._recorded_of = self._adapters.merged
            self._captured = None if self._captured is None else self._captured.over(self.cache)
        if self._captured is not None and not adapted:
            asked = [chunk.request for chunk in chunks if chunk.yields]
            if len(asked) == len(chunks) and not any(one.params.pooling for one in asked):
                logits_RV = self._captured(chunks)
                if logits_RV is not None:
                    return self._chosen(logits_RV, asked)
        rows = Rows(self.cache.block_size)
        for chunk in chunks:
            rows.add(chunk)
        model, device, last = self.model, self.cache.device, rows.last
        fed = rows.fed(device)
        mixer = self._mixer(rows.contexts, fed[2])
        wanted = [place for place, chunk in enumerate(chunks) if chunk.yields]
        pooled = [place for place, chunk in enumerate(chunks) if chunk.request.params.pooling]
        places = [self._pooler.rows(chunks[place], last[place]) for place in pooled]
        needed = [last[place] for place in wanted] + [row for some in places for row in some]
        everything = needed == list(range(fed.shape[1]))
        rows_R = None if everything else torch.tensor(needed, dtype=torch.int64, device=device)
        if adapted and self._adapters is not None and not everything:
            self._adapters.select(chunks, needed)
        with self._streams(chunks), self._computing(chunks, rows.contexts, rows_R):
            hidden_RD = model.flat(fed[0], fed[1], mixer, rows_R)
        if hidden_RD is None:
            return StepResult(tokens={})
        vectors: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        errors: dict[str, str] = {}
        stop = len(wanted)
        for place, some in zip(pooled, places, strict=True):
            start, stop = stop, stop + len(some)
            try:
                vector = self._pooler.add(chunks[place], hidden_RD[start:stop])
            except ServeError as cause:
                failed[chunks[place].request.id] = str(cause)
                continue
            if vector is not None and not all(map(math.isfinite, vector)):
                errors[chunks[place].request.id] = NOT_FINITE
            elif vector is not None:
                vectors[chunks[place].request.id] = vector
        if not wanted:
            return StepResult(tokens={}, failed=failed, errors=errors)
        requests = [chunks[place].request for place in wanted]
        logits_RV = model.logits(hidden_RD[: len(wanted)])
        if logits_RV is None:
            return StepResult(tokens={})
        found = self._chosen(logits_RV, requests)
        return replace(
            found,
            vectors=vectors,
            failed={**failed, **found.failed},
            errors={**found.errors, **errors},
        )

    def _streams(self, chunks: Sequence[Chunk]) -> contextlib.AbstractContextManager[None]:
        """Within, each request is computed by as many streams as it asked for."""
        if all(chunk.request.params.streams is None for chunk in chunks):
            return contextlib.nullcontext()
        assert isinstance(self.model, Transformer)
        most = self.model.config.architecture.streams.num
        counts = [chunk.request.params.streams or most for chunk in chunks]
        lengths = [chunk.length for chunk in chunks]
        counts_N = torch.from_numpy(np.repeat(np.array(counts), lengths))
        return streaming(self.model, counts_N.to(self.cache.device))

    def _computing(
        self, chunks: Sequence[Chunk], contexts: Sequence[Context], rows_R: Tensor | None
    ) -> contextlib.AbstractContextManager[None]:
        """Within, each request takes the share of the model that it asked for."""
        if all(chunk.request.params.compute is None for chunk in chunks):
            return contextlib.nullcontext()
        assert isinstance(self.model, Transformer)
        shifts = torch.tensor([self._ffn.shift(chunk.request.params.compute) for chunk in chunks])
        lengths = torch.tensor([context.length for context in contexts])
        shift_N = shifts.repeat_interleave(lengths).to(self.cache.device)
        return computing(self.model, shift_N, rows_R)

    def _chosen(self, logits_RV: Tensor, requests: list[Request]) -> StepResult:
        """The next token of every row."""
        chosen = choose_rows(self._adjust, logits_RV, requests)
        return StepResult(
            tokens=chosen.tokens, infos=chosen.infos, failed=chosen.failed, errors=chosen.errors
        )

    def _mixer(self, contexts: list[Context], slots_N: Tensor) -> Mixer:
        """Attention of the tokens of one step; see :class:`PagedAttention`."""
        return PagedAttention(
            self.cache,
            contexts,
            slots_N,
            self.model.weight.dtype,
            self.attention,
            prompts=self.prompts,
            exact=self._exact,
            prefix=self._prefix,
        )

    def _check(self, chunk: Chunk) -> None:
        room = len(chunk.request.blocks) * self.cache.block_size
        if chunk.stop > room:
            raise ServeError(
                f"request {chunk.request.id}: its {len(chunk.request.blocks)} blocks hold {room} "
                f"tokens, and the step computes up to {chunk.stop}; the scheduler must allocate "
                "before it plans"
            )
