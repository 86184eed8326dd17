"""The engine: plan a step, execute it, commit what it gave.

It is one loop for every scheduler and every runner, and has no thread of its own: whoever
owns it calls :meth:`Engine.step` while it is :attr:`Engine.busy`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shoal.core.errors import ServeError, require
from shoal.ir import (
    Chunk,
    CountingRunner,
    KVManager,
    Output,
    Purging,
    Request,
    Runner,
    SamplingParams,
    Scheduler,
    Step,
    StepResult,
)
from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from shoal.plan.batching.common import Queues
from shoal.plan.batching.preemption.recompute import Recomputing
from shoal.serve.engine.failure import failure

if TYPE_CHECKING:
    from shoal.serve.adapters.loaded import AdapterBank

__all__ = ["MAX_LOGPROBS", "Engine", "check_params"]

log = logging.getLogger("shoal.serve")

# Most alternatives reported with a token.
MAX_LOGPROBS = 20
MAX_PENALTY = 10.0
MAX_BIAS = 1e6


def check_params(params: SamplingParams, *, streams: int = 1, shares: bool = False) -> None:
    """Refuse what cannot be sampled.

    Args:
        params: of a request.
        streams: of the model, of which a request may ask for fewer.
        shares: the model can compute less for it.

    Raises:
        ServeError: a value that is out of its range.
    """
    for name, value, good, expected in (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "1 or more"),
        (
            "temperature",
            params.temperature,
            params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < math.inf,
            f"0 for the best token, or at least {MIN_TEMPERATURE:g}",
        ),
        ("top_k", params.top_k, params.top_k >= 0, "0 (all) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "(0, 1]"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "0 (all) to 1"),
        (
            "repetition_penalty",
            params.repetition_penalty,
            MIN_REPETITION_PENALTY <= params.repetition_penalty <= MAX_PENALTY,
            f"{MIN_REPETITION_PENALTY} to {MAX_PENALTY}; 1 for none",
        ),
        *(
            (name, value, -MAX_PENALTY <= value <= MAX_PENALTY, f"-{MAX_PENALTY} to {MAX_PENALTY}")
            for name, value in (
                ("frequency_penalty", params.frequency_penalty),
                ("presence_penalty", params.presence_penalty),
            )
        ),
        (
            "logit_bias",
            params.logit_bias,
            all(abs(bias) <= MAX_BIAS and token >= 0 for token, bias in params.logit_bias),
            f"numbers from -{MAX_BIAS:g} to {MAX_BIAS:g} for token ids",
        ),
        (
            "min_tokens",
            params.min_tokens,
            0 <= params.min_tokens <= params.max_tokens,
            f"0 to max_tokens = {params.max_tokens}",
        ),
        (
            "grammar",
            params.stop_ids,
            params.grammar is None or (bool(params.stop_ids) and not params.min_tokens),
            "a token that ends the output, and no min_tokens",
        ),
        (
            "streams",
            params.streams,
            params.streams is None or 1 <= params.streams <= max(1, streams),
            f"1 to {streams}, the streams of the model"
            if streams > 1
            else "1: the model has no parallel streams that a request could choose among",
        ),
        (
            "compute",
            params.compute,
            params.compute is None or (shares and 0 < params.compute <= 1),
            "a share in (0, 1]"
            if shares
            else "nothing: the model has no feed-forward layers of two sizes (ffn: duo) whose "
            "routers were trained; shoal model routers trains them",
        ),
        ("pooling", params.pooling, params.pooling in (None, "mean", "last"), "mean or last"),
        (
            "logprobs",
            params.logprobs,
            params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
            f"0 to {MAX_LOGPROBS}",
        ),
    ):
        require(good, name, value, expected=expected, error=ServeError)


@runtime_checkable
class _Checked(Protocol):
    """Books of blocks that can be compared with the requests that hold them."""

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """AssertionError where they differ."""
        ...


class SwapCounters:
    """What moved between cache and host since the start."""

    def __init__(self) -> None:
        self._blocks = {"out": 0, "in": 0, "own": 0}
        self._copies = 0
        self._seconds = 0.0
        self._since: dict[int, float] = {}

    def count(self, step: Step, result: StepResult, started: float, now: float) -> None:
        """Take in a step that was planned at ``started`` and is over ``now``."""
        for transfer in step.transfers:
            self._blocks[transfer.kind] += sum(copy.num_blocks for copy in transfer.copies)
            self._copies += len(transfer.copies)
            self._since[transfer.id] = started
        for done in result.done:
            self._seconds += now - self._since.pop(done)

    def stats(self) -> dict[str, float]:
        """Counters for metrics."""
        return {
            "swap_out_blocks_total": self._blocks["out"],
            "swap_in_blocks_total": self._blocks["in"],
            "swap_copies_total": self._copies,
            "switch_seconds_total": self._seconds,
        }


class Engine:
    """Requests in, tokens out.

    Args:
        scheduler: decides what runs, and owns the requests.
        runner: computes it.
        kv: the scheduler's bookkeeping of blocks, for :meth:`stats`.
        vocab_size: tokens that the model knows; prompts are checked against it.
        adapters: of the model, by the names that requests call.
        clock: s; what arrival times are given in.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        kv: KVManager | None = None,
        vocab_size: int | None = None,
        adapters: AdapterBank | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.runner, self.kv = scheduler, runner, kv
        self.vocab_size = vocab_size
        self.adapters = adapters
        self._adapted: dict[str, str | None] = {}  # request -> identity of its adapter
        self.clock = clock
        self._prompt_tokens = self._new_tokens = self._steps = self._preemptions = 0
        self._seconds = 0.0
        self._told: list[dict[str, Any]] = []
        # Blocks of requests that failed, to be set to zero before the next step.
        self._scrub: list[int] = []
        self._swaps = SwapCounters()
        self.last_chunks: tuple[Chunk, ...] = ()
        # Refuses what this engine cannot sample; set by whoever knows more than ranges.
        self.check: Callable[[SamplingParams], None] | None = None
        # Of the model; a request may ask for fewer.
        self.streams = 1
        # A request may say how much of the model it takes.
        self.shares = False
        self._guesses = self._right = self._guessing = 0

    def add(self, request: Request) -> None:
        """Queue a request; its arrival is now.

        Raises:
            ServeError: its parameters or tokens are wrong, or it can never run.
        """
        check_params(request.params, streams=self.streams, shares=self.shares)
        if self.check is not None:
            self.check(request.params)
        require(
            request.n_prompt >= 1 and request.n_prompt == len(request.tokens),
            f"request {request.id}: prompt",
            request.n_prompt,
            expected="at least one token, and nothing generated yet",
            error=ServeError,
        )
        if self.vocab_size is not None:
            for token in (min(request.tokens), max(request.tokens)):
                require(
                    0 <= token < self.vocab_size,
                    f"request {request.id}: prompt token",
                    token,
                    expected=f"token ids below vocab_size = {self.vocab_size}",
                    hint="use the tokenizer that belongs to the model",
                    error=ServeError,
                )
            for token in (*request.params.stop_ids, *(t for t, _ in request.params.logit_bias)):
                require(
                    0 <= token < self.vocab_size,
                    f"request {request.id}: stop or biased token",
                    token,
                    expected=f"token ids below vocab_size = {self.vocab_size}",
                    error=ServeError,
                )
        request.arrival = self.clock()
        for own in self._own(request.params):
            request.salt = request.salt if own in request.salt else f"{own} {request.salt}"
        if self.adapters is None:
            self.scheduler.add(request)
            return
        request.adapter = self.adapters.take(request.adapter)
        try:
            self.scheduler.add(request)
        except ServeError:
            self.adapters.leave(request.adapter)
            raise
        self._adapted[request.id] = request.adapter

    def _own(self, params: SamplingParams) -> Iterator[str]:
        """What makes the keys and values of a request others than those of its tokens."""
        if params.streams is not None and self.streams > 1:
            yield f"streams={params.streams}"
        if params.compute is not None:
            # Those of deeper layers follow from what was computed for them.
            yield f"compute={params.compute!r}"

    def abort(self, request_id: str) -> Output | None:
        """Forget a request; None if there is none of that id (any more)."""
        self._ended(request_id)
        return self.scheduler.abort(request_id)

    def _ended(self, request_id: str) -> None:
        if self.adapters is not None and request_id in self._adapted:
            self.adapters.leave(self._adapted.pop(request_id))

    @property
    def busy(self) -> bool:
        """Whether there is a request that is not finished."""
        return self.scheduler.num_running > 0 or self.scheduler.num_waiting > 0

    def step(self) -> list[Output]:
        """Plan, execute and commit one step; nothing when idle.

        What nobody foresaw ends requests, once, and not the engine: those of a step that could
        not be computed, all where planning or committing failed. The books are checked then.

        Raises:
            ServeError: the engine cannot go on.
        """
        try:
            return self._step()
        except ServeError:
            raise
        except Exception as cause:
            self._end_all(cause)
            return []

    def _step(self) -> list[Output]:
        started = self.clock()
        step = self.scheduler.plan(started)
        self._preemptions += len(step.preempted)
        self.last_chunks = step.chunks
        if not step:
            return []
        step = self._scrubbing(step)
        return self._commit(step, self.runner.execute(step), started, self.scheduler.commit)

    def _scrubbing(self, step: Step) -> Step:
        """The step, which first sets to zero what failed requests have left."""
        if not self._scrub:
            return step
        blocks, self._scrub = tuple(self._scrub), []
        return replace(step, scrub=blocks)

    def _commit(
        self,
        step: Step,
        result: StepResult,
        started: float,
        commit: Callable[[Step, StepResult, float], list[Output]],
    ) -> list[Output]:
        """Take in what a step gave; ``commit`` is the scheduler's."""
        prompt = sum(
            max(0, min(chunk.stop, chunk.request.n_prompt) - chunk.start) for chunk in step.chunks
        )
        new = [chunk.request for chunk in step.chunks if chunk.request.began is None]
        if new:
            for request in new:
                request.began = started
            ids = [request.id for request in new]
            self._told.append({"kind": "began", "ids": ids, "at": started})
        now = self.clock()
        dirty = [b for c in step.chunks if c.request.id in result.errors for b in c.request.blocks]
        for kind, reasons in (("refused", result.failed), ("error", result.errors)):
            for request_id, reason in reasons.items():
                self.abort(request_id)
                self._told.append({"kind": kind, "id": request_id, "message": reason})
        for request_id, values in result.vectors.items():
            self._told.append({"kind": "vector", "id": request_id, "values": list(values)})
        self._swaps.count(step, result, started, now)
        outputs = commit(step, result, now)
        if result.errors:
            self._scrub += self.kv.purge(dirty) if isinstance(self.kv, Purging) else dirty
            self.check_integrity()
        if self._adapted:
            for output in outputs:
                if output.finish is not None:
                    self._ended(output.request_id)
        for request_id, nodes in result.guessed.items():
            if not nodes:
                continue
            self._guessing += 1
            self._guesses += nodes
            self._right += len(result.tokens[request_id]) - 1
        self._steps += 1
        self._seconds += now - started
        self._prompt_tokens += prompt
        # As many as were given: of guesses that hold, those behind the end of an answer are not.
        self._new_tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    def _end_all(self, cause: Exception) -> None:
        """End all requests: it is not known what of the books was changed before they failed.

        Raises:
            ServeError: they cannot be trusted any more.
        """
        scheduler: object = self.scheduler
        # What is on its way between cache and host belongs to nobody then.
        if not isinstance(scheduler, Queues) or not isinstance(scheduler.preemption, Recomputing):
            raise cause
        log.error("a step failed; all its requests end", exc_info=cause)
        reason = failure(cause)
        for request_id in list(scheduler.requests):
            self.abort(request_id)
            self._told.append({"kind": "error", "id": request_id, "message": reason})
        self.check_integrity()

    def check_integrity(self) -> None:
        """Compare the books of blocks with the requests that hold them.

        Raises:
            ServeError: a block is lost, counted wrongly or held where it must not be.
        """
        kv: object = self.kv
        scheduler: object = self.scheduler
        if not isinstance(kv, _Checked) or not isinstance(scheduler, Queues):
            return
        try:
            kv.check_integrity(scheduler.requests)
        except AssertionError as cause:
            raise ServeError(
                f"the books of the cache are wrong ({cause}); the engine must start again"
            ) from cause

    def told(self) -> list[dict[str, Any]]:
        """What the last steps gave besides tokens, once: who failed or began, and vectors.

        ``refused`` and ``error`` (id, message), ``began`` (ids, at) or ``vector`` (id, values), as
        messages of the process.
        """
        told, self._told = self._told, []
        return told

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start, for metrics."""
        kept = dict(self.kv.stats()) if self.kv is not None else {}
        return {
            "requests_running": self.scheduler.num_running,
            "requests_waiting": self.scheduler.num_waiting,
            "tokens_prompt_total": self._prompt_tokens,
            "tokens_generated_total": self._new_tokens,
            "steps_total": self._steps,
            "step_seconds_total": self._seconds,
            "preemptions_total": self._preemptions,
            "draft_trees_total": self._guessing,
            "draft_tokens_total": self._guesses,
            "draft_tokens_accepted_total": self._right,
            **self._swaps.stats(),
            **(self.runner.stats() if isinstance(self.runner, CountingRunner) else {}),
            **(self.adapters.stats() if self.adapters is not None else {}),
            "blocks_used": kept.get("blocks_used", 0.0),
            "blocks_total": self.kv.num_blocks if self.kv is not None else 0.0,
            "prefix_hit_tokens": kept.get("prefix_hit_tokens", 0.0),
            "prefix_query_tokens": kept.get("prefix_query_tokens", 0.0),
            "forks_total": kept.get("forks", 0.0),
            "blocks_copied_total": kept.get("blocks_copied", 0.0),
        }
