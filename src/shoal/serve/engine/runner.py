"""A model on this machine, executing the steps of a scheduler.

All tokens of a step lie side by side in one vector, each with its position and its slot
in the cache: linear layers see no padding, and a step may mix decodes with parts of
prompts as it likes.
"""

from __future__ import annotations

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
from shoal.model.parscale import prefixes
from shoal.serve.cache.attention import PagedAttention, RequestContext
from shoal.serve.cache.paged import PagedCache
from shoal.serve.engine.adjust import Adjuster
from shoal.serve.engine.failure import errors_of_step
from shoal.serve.engine.hooks import EngineHook, ForwardPass, beside
from shoal.serve.engine.token_choice import choose_rows

if TYPE_CHECKING:
    from shoal.serve.decode.protocols import TokenTree


class FlatModel(Protocol):
    """What computes tokens side by side: a model, or the part of one that this process has."""

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""

    @property
    def weight(self) -> Tensor:
        """A weight: of the dtype and on the device of all."""

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, needed: Tensor | None = None
    ) -> Tensor | None:
        """See :meth:`~shoal.model.transformer.Transformer.flat`; None if others go on with it."""

    def logits(self, hidden_RD: Tensor) -> Tensor | None:
        """Scores [R, V]; None if others choose by them."""


class FlatTokens:
    """The flattened tokens of a step: ids, positions and cache slots."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._token: list[int] = []
        self._position: list[int] = []
        self._slot: list[int] = []
        self.last: list[int] = []  # of every chunk: the row of its last token
        self.contexts: list[RequestContext] = []

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
        self.contexts.append(RequestContext(first, chunk.length, blocks, virtual=virtual))

    def add_tree(self, chunk: Chunk, tree: TokenTree) -> None:
        """Root and nodes: each has the place of its depth, and a slot of its own."""
        first, rows = chunk.start, len(tree.shape)
        self._token += tree.tokens.clip(0).tolist()
        self._position += (first + tree.shape.depth).tolist()
        self._slot += slots(chunk.request.blocks, range(first, first + rows), self._size)
        self.last.append(len(self._token) - 1)
        self.contexts.append(RequestContext(first, rows, chunk.request.blocks, tree.shape.seen))

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
        exact: the bits of a request's results do not depend on the rest of the batch.
        hooks: hooks that run during a step.
        clock: s, for the duration of a step.

    Attributes:
        hooks: of all techniques, in their order.
        shared: others compute parts of the same step: one that fails here leaves them waiting.

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
        hooks: Iterable[EngineHook] = (),
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
        self.shared = False
        self.attention, self.prompts, self._exact = attention, prompts, exact
        self._prefix = prefixes(model) if model.config.architecture.streams.num > 1 else None
        self._clock = clock
        self._adjust = Adjuster(*hooks)
        self.hooks = self._adjust.hooks

    def beside(
        self, cache: PagedCache, *, clock: Callable[[], float] = time.perf_counter
    ) -> LocalRunner:
        """One that computes in the same way, on another cache of the same form."""
        return LocalRunner(
            self.model,
            cache,
            attention=self.attention,
            prompts=self.prompts,
            exact=self._exact,
            hooks=beside(self.hooks, cache),
            clock=clock,
        )

    def execute(self, step: Step) -> StepResult:
        """Compute a step; its keys and values go to the blocks of its requests.

        Raises:
            ServeError: a request holds too few blocks for its tokens, or a transfer failed.
        """
        start = self._clock()
        if step.transfers or step.wait_for:
            if not self.hooks.at(EngineHook.transfer):
                raise ServeError("the step copies blocks and no hook does; give it a mover")
            self.hooks(EngineHook.transfer, step)
        result = StepResult({})
        if step.chunks:
            with torch.inference_mode():
                self.cache.clear(step.scrub)
                self.cache.move(step.moves)
                result = self._compute(step) if self.shared else self._contained(step)
        over = [transferred() for transferred in self.hooks.at(EngineHook.transferred)]
        done = frozenset[int]().union(*over)
        return replace(result, seconds=self._clock() - start, done=done)

    def _contained(self, step: Step) -> StepResult:
        """Compute a step; an unexpected error ends its requests, and nothing else.

        Nothing of the step was taken into any books yet, so the blocks of its requests are given
        back as those of any that is aborted.

        Raises:
            ServeError: another process is gone, or the books are wrong: nothing can go on.
            RuntimeError: the device does not work any more.
        """
        try:
            return self._compute(step)
        except ServeError:
            raise
        except Exception as cause:
            return StepResult({}, errors=errors_of_step(step.chunks, cause, self.cache.device))

    def _compute(self, step: Step) -> StepResult:
        # Single tokens first and longest context first, as attention wants them.
        work = ForwardPass(sorted(step.chunks, key=lambda chunk: (chunk.length > 1, -chunk.stop)))
        for chunk in work.chunks:
            self._check(chunk)
        self.hooks(EngineHook.before_pass, work)
        requests = [chunk.request for chunk in work.chunks if chunk.yields]
        if work.plain and len(requests) == len(work.chunks):
            for replay in self.hooks.at(EngineHook.replay):
                logits_RV = replay(work)
                if logits_RV is not None:
                    return self._chosen(logits_RV, requests)
        return self._passed(work, requests)

    def _passed(self, work: ForwardPass, asked: list[Request]) -> StepResult:
        """Compute a pass, and choose the tokens of those that are asked for one."""
        rows = FlatTokens(self.cache.block_size)
        for chunk in work.chunks:
            rows.add(chunk)
        fed = rows.fed(self.cache.device)
        mixer = self._mixer(rows.contexts, fed[2])
        work.contexts, work.last = rows.contexts, rows.last
        work.rows = [row for chunk, row in zip(work.chunks, rows.last, strict=True) if chunk.yields]
        self.hooks(EngineHook.lay_out, work)
        if work.rows != list(range(fed.shape[1])):
            work.needed = torch.tensor(work.rows, dtype=torch.int64, device=self.cache.device)
        with self.hooks.within(EngineHook.around, work):
            hidden_RD = self.model.flat(fed[0], fed[1], mixer, work.needed)
        if hidden_RD is None:
            return StepResult({})
        logits_RV = self.model.logits(hidden_RD[: len(asked)]) if asked else None
        result = StepResult({}) if logits_RV is None else self._chosen(logits_RV, asked)
        for computed in self.hooks.at(EngineHook.computed):
            result = computed(work, hidden_RD, result)
        return result

    def _chosen(self, logits_RV: Tensor, requests: list[Request]) -> StepResult:
        """The next token of every row."""
        chosen = choose_rows(self._adjust, logits_RV, requests)
        return StepResult(
            tokens=chosen.tokens, infos=chosen.infos, failed=chosen.failed, errors=chosen.errors
        )

    def _mixer(self, contexts: list[RequestContext], slots_N: Tensor) -> Mixer:
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
