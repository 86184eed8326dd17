"""What schedulers share (the books of requests, refusal, commit, abort), and what caches do.

A scheduler is what :class:`~shoal.ir.engine.Scheduler` promises; it adds ``plan`` to this.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.errors import ServeError, require
from shoal.ir import (
    Chunk,
    CompactingKVManager,
    Drafting,
    KVManager,
    Output,
    Preemption,
    Request,
    SamplingParams,
    SchedulerLimits,
    Step,
    StepResult,
)
from shoal.ir.serving import FinishReason
from shoal.plan.batching.cohort import Cohort
from shoal.plan.batching.preemption.recompute import RecomputePreemption

_DIGEST_BYTES = 16
# Twice as fast as Output(...), which matters with millions of tokens.
_output = partial(tuple.__new__, Output)


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of a cache of so many tokens.

    Raises:
        ConfigError: not even one.
    """
    require(
        num_tokens >= block_size,
        "kv_tokens",
        num_tokens,
        expected=f"at least one block of {block_size} tokens",
        hint="give the cache more tokens, or use a smaller kv.block_size",
    )
    return num_tokens // block_size


BlockSize = Annotated[int, Ge(1), Le(4096)]
"""Tokens of a block of a cache."""


class DigestChain:
    """Digests of the full blocks of a request: of all tokens up to the end of each block.

    The adapter and the salt are part of them. They are cryptographic: with a plain hash, a client
    could make a prompt that is answered from another client's cache.
    """

    __slots__ = ("_digests", "_identity", "_state")

    def __init__(self, request: Request, block_size: int) -> None:
        self._digests: list[bytes] = []
        self._identity = block_size, request.adapter, request.salt
        begin = repr(self._identity[1:]).encode() + b"\0"
        self._state = hashlib.blake2b(begin, digest_size=_DIGEST_BYTES)

    def upto(self, request: Request, blocks: int) -> Sequence[bytes]:
        """At least the digests of the first ``blocks`` full blocks of the same request."""
        digests, size = self._digests, self._identity[0]
        first, stop = len(digests) * size, blocks * size
        if first >= stop:
            return digests
        prompt = request.prompt
        if prompt is not None:
            tokens, known = prompt.digests.get(self._identity, ((), ()))
            own = len(prompt)
            if len(known) >= blocks and (
                stop <= own or tokens[own:stop] == request.tokens[own:stop]
            ):
                return known
        packed = memoryview(array("q", request.tokens[first:stop])).cast("B")
        for place in range(0, len(packed), 8 * size):
            self._state.update(packed[place : place + 8 * size])
            digests.append(self._state.digest())
        if prompt is not None:
            prompt.digests[self._identity] = request.tokens[:stop], [*digests]
        return digests


def guessable(params: SamplingParams) -> bool:
    """Whether what a request may say next depends on no more than its tokens and its seed.

    Penalties, biases and grammars change with every token: such requests decode one by one.
    """
    return (
        params.repetition_penalty == 1
        and not params.frequency_penalty
        and not params.presence_penalty
        and not params.logit_bias
        and not params.min_tokens
        and params.grammar is None
        and not params.reads_prompt
    )


def most_cached(request: Request, max_position: int) -> int:
    """Most tokens of a request that ever lie in the cache; the last one never does."""
    return min(request.n_prompt + request.params.max_tokens, max_position) - 1


class Queues:
    """Requests that wait, in the order of their arrival, and those that run.

    Args:
        kv: bookkeeping of the cache; this scheduler is its only user.
        preemption: what becomes of a cache that is taken away; by recomputing if not given.
    """

    def __init__(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> None:
        self.kv = kv
        self._slots = kv if isinstance(kv, CompactingKVManager) else None
        self.limits = limits
        self.preemption: Preemption = preemption or RecomputePreemption(kv)
        self.waiting: deque[Request] = deque()
        # By id, in the order of admission.
        self.running: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        # Whether decodes guess tokens; set by code whose runner can.
        self.drafting: Drafting | None = None
        # Decodes that are counted, where a simulation asks for no more.
        self.cohort = Cohort(kv)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    def most_cached(self, request: Request) -> int:
        """Most tokens of a request that ever lie in the cache; the last one never does."""
        return most_cached(request, self.limits.max_position)

    def admit_whole(self) -> None:
        """Start those that wait, first come, while the cache holds them at their full lengths."""
        while self.waiting and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            self.kv.match_prefix(request)
            if not self.kv.allocate(request, self.most_cached(request)):
                self.kv.free(request)
                return
            self._start(request)

    def add(self, request: Request) -> None:
        """See :class:`~shoal.ir.engine.Scheduler`."""
        most = self.most_cached(request)
        if self._slots is not None:
            # The end of a slot is no reason to end an answer: one that might reach it is refused.
            most = request.n_prompt + request.params.max_tokens - 1
        # Words only for what is wrong: simulations add requests by the ten thousand.
        if (
            request.id in self.requests
            or not 1 <= request.n_prompt <= len(request.tokens) < self.limits.max_position
            or request.params.max_tokens < 1
            or not self.kv.fits(most)
        ):
            self._refuse(request, most)
        request.state = "waiting"
        self.requests[request.id] = request
        self.waiting.append(request)

    def _refuse(self, request: Request, most: int) -> None:
        """Say why a request can never run, of which ``most`` tokens would be in the cache."""
        where = f"request {request.id}"
        require(
            request.id not in self.requests,
            "request.id",
            request.id,
            expected="an id that no running request has",
            error=ServeError,
        )
        require(
            request.n_prompt >= 1 and len(request.tokens) >= request.n_prompt,
            f"{where}: prompt tokens",
            request.n_prompt,
            expected="at least 1",
            error=ServeError,
        )
        require(
            request.params.max_tokens >= 1,
            f"{where}: max_tokens",
            request.params.max_tokens,
            expected="at least 1",
            error=ServeError,
        )
        require(
            len(request.tokens) < self.limits.max_position,
            f"{where}: prompt tokens",
            len(request.tokens),
            expected=f"at most {self.limits.max_position - 1}, one less than max_position",
            hint="shorten the prompt, or serve with a larger max_position",
            error=ServeError,
        )
        room = f"at most {self.kv.num_blocks * self.kv.block_size}, all that the cache holds"
        larger = "more kv_tokens"
        if self._slots is not None:
            room, larger = f"at most {self._slots.max_len}, the max_len of a slot", "longer slots"
        require(
            self.kv.fits(most),
            f"{where}: tokens to keep in the cache",
            most,
            expected=room,
            hint=f"prompt {request.n_prompt} + max_tokens {request.params.max_tokens}: shorten "
            f"one of them, or serve with {larger}",
            error=ServeError,
        )

    def abort(self, request_id: str) -> Output | None:
        """See :class:`~shoal.ir.engine.Scheduler`."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.state == "waiting":
            self.waiting.remove(request)
        self._forget(request, keep=False)
        return Output(request_id, (), finish="abort")

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """See :class:`~shoal.ir.engine.Scheduler`."""
        self.preemption.settle(result.done, now)
        # The loop over all chunks of all steps is what a simulation spends its time in.
        running, longest, computed = self.running, self.limits.max_position, self.kv.computed
        tokens_of, infos_of = result.tokens, result.infos
        outputs: list[Output] = []
        if result.guessed and self.drafting is not None:
            self.drafting.observe(
                list(result.guessed.values()), [len(tokens_of[one]) - 1 for one in result.guessed]
            )
        if self.drafting is not None and {chunk.length for chunk in step.chunks} == {1}:
            nodes = sum(result.guessed.values())
            self.drafting.took(len(step.chunks), len(result.guessed), nodes, result.seconds)
        chunks: Sequence[Chunk] = step.chunks
        if step.decodes:
            leaving = self._in_order(self.cohort.advance())
            tokens_of = {**tokens_of, **dict.fromkeys(leaving, (0,))}
            chunks = [*leaving.values(), *chunks]
        for request, start, length, _ in chunks:
            name = request.id
            if running.get(name) is not request:
                continue  # aborted while the step ran
            tokens, params = request.tokens, request.params
            request.n_computed = stop = start + length
            computed(request)
            if stop != len(tokens):
                continue
            given = tokens_of.get(name)
            if not given:
                raise ServeError(
                    f"request {name}: the runner gave no token for a chunk that ends at its "
                    f"last token, {stop}; it must give at least one"
                )
            most = request.n_prompt + params.max_tokens
            most = most if most < longest else longest
            finish: FinishReason | None = None
            for token in given:
                tokens.append(token)
                if token in params.stop_ids:
                    finish = "stop"
                    break
                if len(tokens) >= most:
                    finish = "length"
                    break
            if len(given) == 1:
                new = given
            else:
                new = tuple(tokens[stop:])
                request.n_computed = len(tokens) - 1
                computed(request)
            infos = tuple(infos_of.get(name, ())[: len(new)]) if infos_of else ()
            outputs.append(_output((name, new, infos, finish, request.n_cached)))
            if finish is not None:
                self._forget(request, keep=True)
        return outputs

    def _in_order(self, chunks: dict[str, Chunk]) -> dict[str, Chunk]:
        """Chunks by the ids of their requests, the oldest first."""
        if len(chunks) < 2:
            return chunks
        return {name: chunks[name] for name in self.running if name in chunks}

    def _drafts(self, chunks: list[Chunk], room: int) -> list[Chunk]:
        """Decodes with the guesses that there is room for; no request gives way to a guess.

        Args:
            chunks: all decodes of a step.
            room: tokens that the step may have more.
        """
        drafting, kv = self.drafting, self.kv
        if drafting is None or not chunks:
            return chunks
        # A drafter reads all of a request before its first guess: in vain, if prompts that come
        # make it a batch for which guesses do not pay.
        coming = min(len(self.waiting), max(0, self.limits.max_running - len(self.running)))
        together = max(len(chunks), len(self.running) + coming)
        nodes = min(drafting.nodes(together), max(0, room) // len(chunks))
        if nodes < 1:
            return chunks
        results = []
        for chunk in chunks:
            request = chunk.request
            # The last token is never computed, so no guess is made for it.
            left = self.most_cached(request) - chunk.stop
            drafts = min(nodes, self.limits.max_position - chunk.stop - 1)
            if left < 1 or drafts < 1 or not guessable(request.params):
                results.append(chunk)
                continue
            held = len(request.blocks)
            if not kv.allocate(request, chunk.stop + drafts):
                results.append(chunk)
                continue
            if len(request.blocks) > held:
                self.preemption.wait(request.blocks[held:])
            results.append(chunk._replace(drafts=drafts))
        return results

    def lose(self, request: Request) -> None:
        """What the cache held of a request is gone: it waits again, before all others."""
        if self.running.pop(request.id, None) is None:
            return
        self.cohort.leave(request.id)
        self.preemption.take(request)
        request.state = "waiting"
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _forget(self, request: Request, *, keep: bool) -> None:
        self.running.pop(request.id, None)
        self.cohort.leave(request.id)
        del self.requests[request.id]
        self.preemption.drop(request, keep=keep)
        request.state = "finished"

    def _start(self, request: Request) -> None:
        """Move the first one that waits to those that run or will; it has what was cached."""
        self.waiting.popleft()
        self.running[request.id] = request
        if request.state == "waiting":
            request.state = "running"
        request.n_cached = min(request.n_computed, request.n_prompt)
