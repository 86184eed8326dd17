"""The loop of diffusion decoding: forward, unmask, again, for several requests at once.

Each request works on a block of its own; when it is done it goes on to the next while others
are still busy (ragged completion). Whether a block is through is asked once in ``unroll``
iterations: those that were done for nothing are cheaper than asking a device each time.

Source: Ma et al., dInfer, 2025, sections 4 and 5 (loop unrolling).
Shapes: B requests of a step, W places of a block, V vocabulary, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.core.random import generator
from shoal.ir import Chunk, Request, Step, StepResult
from shoal.model.transformer import Transformer
from shoal.plan.batching.schedulers.masked import block_of, full_length
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.diffusion.protocols import Iteration, Refresh, Unmask, UnmaskState, Window
from shoal.serve.decode.diffusion.windows import WindowRow, Windows
from shoal.serve.engine.failure import errors_of_step
from shoal.serve.engine.hooks import EngineHook
from shoal.serve.engine.token_choice import NOT_FINITE


@dataclass
class _Work:
    """A request and the block that it works on."""

    request: Request
    slot: int
    block: Window
    length: int
    step: int = 0


class _Batch:
    """What iterations change, for requests that stay together."""

    def __init__(
        self, work: list[_Work], vocab: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.work = work
        self.keys = [(id(one.request), one.block) for one in work]
        sizes = [one.block[1] - one.block[0] for one in work]
        self.size_B = torch.tensor(sizes, device=device)
        self.step_B = torch.tensor([one.step for one in work], device=device)
        self.masked_BW = torch.arange(max(sizes), device=device) < self.size_B[:, None]
        shape = (len(work), max(sizes), vocab)
        self.last_BWV = torch.zeros(shape, dtype=dtype, device=device)
        self.memory_BWV: Tensor | None = None
        self.sound_B = torch.ones(len(work), dtype=torch.bool, device=device)

    def take_over(self, other: _Batch) -> None:
        """Go on where these requests were, if they work on the same block as there."""
        places = {key: row for row, key in enumerate(other.keys)}
        for row, key in enumerate(self.keys):
            old = places.get(key)
            if old is None:
                continue
            width = key[1][1] - key[1][0]
            for name in ("masked_BW", "last_BWV", "memory_BWV"):
                source = getattr(other, name)
                if source is None:
                    continue
                if getattr(self, name) is None:
                    setattr(self, name, torch.zeros_like(self.last_BWV))
                getattr(self, name)[row, :width] = source[old, :width]


class DiffusionRunner(EngineHook):
    """Computes the steps of a :class:`~shoal.plan.batching.schedulers.masked.MaskedScheduler`.

    Args:
        model: of masked diffusion; computes in the dtype of its weights, where they are.
        cache: of the same dtype and device.
        unmask: which tokens are unmasked.
        refresh: what is recomputed.
        iteration: the input at masked positions.
        longest: most tokens and masks of a request.
        rows: most requests of a step.
        unroll: iterations of a step.
        clock: s, for the duration of a step.
    """

    kind: ClassVar[str] = "diffusion"

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        *,
        unmask: Unmask,
        refresh: Refresh,
        iteration: Iteration,
        block: int,
        longest: int,
        rows: int,
        unroll: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert model.config.mask_token_id is not None
        self.model, self.cache = model, cache
        self.unmask, self.refresh, self.iteration = unmask, refresh, iteration
        self._block, self._longest, self._unroll, self._clock = block, longest, unroll, clock
        self._mask = model.config.mask_token_id
        weight = model.weight
        # Probabilities are taken in fp32, or in fp64 where the model computes in it.
        self._exact = torch.promote_types(weight.dtype, torch.float32)
        # Tokens and masks of each request, by slot.
        self._ids = torch.full((rows, longest), self._mask, device=weight.device)
        self._free = list(range(rows))[::-1]
        self._work: dict[str, _Work] = {}
        self._batch: _Batch | None = None
        self._windows: dict[tuple[WindowRow, ...], Windows] = {}
        self._embedding = model.embed.weight
        self.counts = {"forwards": 0, "rows": 0, "passes": 0, "tokens": 0}

    def metrics(self) -> Mapping[str, float]:
        """Counters for metrics: forward passes, those of each request, and what came of them."""
        return {
            "diffusion_forwards_total": self.counts["forwards"],
            "diffusion_request_forwards_total": self.counts["passes"],
            "diffusion_computed_tokens_total": self.counts["rows"],
            "diffusion_unmasked_tokens_total": self.counts["tokens"],
        }

    def execute(self, step: Step) -> StepResult:
        """Some iterations for the block of every request of the step."""
        start = self._clock()
        if not step.chunks:
            return StepResult({}, seconds=self._clock() - start)
        with torch.inference_mode():
            self.cache.clear(step.scrub)
            batch = self._arrange(step.chunks)
            try:
                for _ in range(self._unroll):
                    self._iterate(batch)
                tokens, errors = self._finished(batch)
            except ServeError:
                raise
            except Exception as cause:
                self._batch, tokens = None, {}
                errors = errors_of_step(step.chunks, cause, self.cache.device)
        return StepResult(tokens, errors=errors, seconds=self._clock() - start)

    # ------------------------------------------------------------------ who works on what

    def _arrange(self, chunks: Sequence[Chunk]) -> _Batch:
        """The batch of a step: the last one, where no request has come, gone or begun a block."""
        here = {chunk.request.id: chunk.request for chunk in chunks}
        old = self._batch
        for name in [
            name for name, work in self._work.items() if here.get(name) is not work.request
        ]:
            self._free.append(self._work.pop(name).slot)
            old = None
        changed = old is None
        for request in here.values():
            work = self._work.get(request.id)
            if work is None:
                work = self._begin(request)
                changed = True
            block = block_of(request, self._block, self._longest)
            if work.block != block:
                work.block, work.step = block, 0
                changed = True
        if changed or self._batch is None:
            made = _Batch(
                list(self._work.values()),
                self.model.config.vocab_size,
                self._exact,
                self.cache.device,
            )
            if self._batch is not None:
                made.take_over(self._batch)
            self._batch = made
        return self._batch

    def _begin(self, request: Request) -> _Work:
        """A request's tokens and masks, in a slot of its own."""
        work = _Work(request, self._free.pop(), (0, 0), full_length(request, self._longest))
        self._ids[work.slot] = self._mask
        self._ids[work.slot, : len(request.tokens)] = torch.tensor(request.tokens)
        self._work[request.id] = work
        return work

    def _finished(self, batch: _Batch) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Tokens of the blocks without a mask, and whose scores are not finite."""
        left_B, sound_B = torch.stack([batch.masked_BW.any(1), batch.sound_B]).tolist()
        tokens: dict[str, tuple[int, ...]] = {}
        errors: dict[str, str] = {}
        for work, left, sound in zip(batch.work, left_B, sound_B, strict=True):
            if not sound:
                errors[work.request.id] = NOT_FINITE
            elif not left:
                values = self._ids[work.slot, work.block[0] : work.block[1]].tolist()
                tokens[work.request.id] = tuple(values)
                self.counts["tokens"] += len(values)
        return tokens, errors

    # ------------------------------------------------------------------ one iteration

    def _iterate(self, batch: _Batch) -> None:
        windows = self._places(batch.work)
        logits_BWV = self._forward(batch, windows)
        bar = self.iteration.bar
        state = UnmaskState(
            step=batch.step_B,
            size=batch.size_B,
            bar=lambda tau: bar(tau, batch.step_B),
            noise=self._noise(batch),
            memory=batch.memory_BWV,
        )
        token_BW, chosen_BW = self.unmask.select(logits_BWV, batch.masked_BW, state)
        batch.memory_BWV, batch.last_BWV = state.memory, logits_BWV
        score_BW = logits_BWV.gather(-1, token_BW[..., None])[..., 0]
        batch.sound_B &= (score_BW.isfinite() | ~batch.masked_BW).all(1)
        at = windows.token_N[windows.block_rows][chosen_BW.view(-1)]
        self._ids.view(-1)[at] = token_BW[chosen_BW]
        batch.masked_BW = batch.masked_BW & ~chosen_BW
        batch.step_B = batch.step_B + 1
        for work in batch.work:
            work.step += 1
        self.counts["forwards"] += 1
        self.counts["passes"] += len(batch.work)
        self.counts["rows"] += windows.num_tokens

    def _places(self, work: Sequence[_Work]) -> Windows:
        rows = tuple(
            WindowRow(
                one.slot,
                one.block,
                one.length,
                self.refresh.window(one.block, one.length, one.step),
                tuple(one.request.blocks),
            )
            for one in work
        )
        places = self._windows.get(rows)
        if places is None:
            if len(self._windows) > 8:
                self._windows.clear()
            places = self._windows[rows] = Windows(rows, self.cache, self._longest)
        return places

    def _forward(self, batch: _Batch, windows: Windows) -> Tensor:
        """Scores [B, W, V] of the places of every block; the mask itself is never one of them."""
        model = self.model
        token_N = self._ids.view(-1)[windows.token_N]
        x_ND = torch.nn.functional.embedding(token_N, self._embedding)
        shape = batch.masked_BW.shape
        if self.iteration.smooths:
            rows = windows.block_rows.view(shape)[batch.masked_BW]
            seen_BWD = self.iteration.inputs(
                self._embedding[self._mask].expand(*shape, -1),
                batch.last_BWV,
                self._embedding,
                batch.step_B,
            )
            x_ND[rows] = seen_BWD[batch.masked_BW]
        result = model.through(x_ND, windows.place_N, windows, windows.block_rows)
        logits = model.logits(model.finished(*result)).to(self._exact).view(*shape, -1)
        logits[..., self._mask] = float("-inf")
        return logits

    def _noise(self, batch: _Batch) -> Tensor | None:
        """Gumbel noise of the requests that sample, by their own seeds; None if none does."""
        if not any(one.request.params.temperature > 0 for one in batch.work):
            return None
        noise_BWV = torch.zeros_like(batch.last_BWV)
        for row, one in enumerate(batch.work):
            params = one.request.params
            if params.temperature > 0:
                source = generator(
                    params.seed, purpose="diffusion", step=one.step, index=one.block[0]
                )
                size = (one.block[1] - one.block[0], noise_BWV.shape[-1])
                drawn = params.temperature * source.gumbel(size=size)
                noise_BWV[row, : size[0]] = torch.from_numpy(np.ascontiguousarray(drawn))
        return noise_BWV
