"""First come, first served, with continuous batching and chunked prompts.

Requests join and leave at every step. A step has one token of every request that
generates, and what is left of the token budget goes to prompts, cut where it ends. When
the cache is full, the request that came last gives its blocks back. It is computed again
later, or its keys and values wait on the host, as the preemption decides; while they
arrive, the others run.

All running requests came before all waiting ones, at any time: admission takes from the
head of the queue only, and preemption puts the youngest running request back there. So
no request is overtaken, the oldest request always runs, and one that fits alone finishes.

Several answers to one prompt are forks of the first. They stand aside until it has computed the
prompt, and then go before all that wait, with its blocks, so that the prompt is computed once.

Sources: Yu et al., Orca, 2022 (iteration-level scheduling); Agrawal et al.,
Sarathi-Serve, 2024 (chunked prompts beside decodes); Kwon et al., PagedAttention, 2023,
section 4.5 (preemption by recomputation and by swapping).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, ClassVar, Self

from annotated_types import Ge, Lt

from shoal.core.errors import ServeError, require
from shoal.core.parts import part
from shoal.ir import (
    Chunk,
    Copy,
    ForkingKVManager,
    KVManager,
    Machine,
    Output,
    Preemption,
    Request,
    SchedulerLimits,
    ServeWork,
    Step,
    StepResult,
)
from shoal.plan.batching.common import Queues

# States in which what a request has computed lies in its blocks.
_HOLDING = ("running", "computing")
# Twice as fast as Chunk(...), which matters with millions of tokens.
_chunk = partial(tuple.__new__, Chunk)


@part
class Fcfs:
    """Continuous batching, first come, first served.

    Args:
        chunked: split prompts into chunks that fit a step; otherwise a prompt waits for a step that
            holds all of it (recomputation after preemption may still be chunked).
        watermark: share of the cache that stays free when a request is admitted, for the growth of
            running requests.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"reads_no_clock"})
    chunked: bool = True
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """For every workload."""
        yield cls()

    def build(
        self, kv: KVManager, limits: SchedulerLimits, preemption: Preemption | None = None
    ) -> FcfsScheduler:
        return FcfsScheduler(kv, limits, preemption, chunked=self.chunked, watermark=self.watermark)


class FcfsScheduler(Queues):
    """The scheduler that :class:`Fcfs` builds.

    Args:
        kv: bookkeeping of the cache.
        chunked: prompts may be cut.
        watermark: share of the cache to leave free on admission.
    """

    def __init__(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        preemption: Preemption | None = None,
        *,
        chunked: bool = True,
        watermark: float = 0.01,
    ) -> None:
        super().__init__(kv, limits, preemption)
        self.chunked = chunked
        self._reserve = int(watermark * kv.num_blocks)
        # The head of the queue and the free blocks when it did not fit: until more are free
        # there is no use in trying again.
        self._refused: tuple[str, int] | None = None
        self._forking = kv if isinstance(kv, ForkingKVManager) else None
        # By id of the request whose prompt they need: those that stand aside.
        self._forks: dict[str, list[Request]] = {}
        self._counts = False

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self.waiting) + sum(map(len, self._forks.values()))

    def add(self, request: Request) -> None:
        if not self.chunked:
            require(
                len(request.tokens) <= self.limits.max_step_tokens,
                f"request {request.id}: prompt tokens",
                len(request.tokens),
                expected=f"at most max_step_tokens = {self.limits.max_step_tokens}, since prompts "
                "are not cut",
                hint="shorten the prompt, raise max_step_tokens, or set scheduler.chunked = true",
                error=ServeError,
            )
        super().add(request)
        parent = self._parent(request)
        if parent is not None and not parent.n_generated:
            self.waiting.pop()
            self._forks.setdefault(parent.id, []).append(request)

    def abort(self, request_id: str) -> Output | None:
        request = self.requests.get(request_id)
        aside = self._forks.get(request.fork_of or "", []) if request is not None else []
        if request in aside:
            aside.remove(request)
            self.waiting.append(request)
        return super().abort(request_id)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        outputs = super().commit(step, result, now)
        if self._forks:
            for name in [one for one in self._forks if self.requests[one].n_generated]:
                self._release(name)
        return outputs

    def count_decodes(self) -> None:
        self._counts = True

    def plan(self, now: float) -> Step:
        preempted = self._displace()
        displaced = len(preempted)
        decodes = self._decodes(preempted)
        decoding = taken = len(decodes) + len(self.cohort.members)
        if self.drafting is not None:
            taken += sum(one.drafts for one in decodes)
        budget = self.limits.max_step_tokens - taken
        prompts: list[Chunk] = []
        # Where all decode, no request has a prompt to go on with.
        for request in self.running.values() if decoding < len(self.running) else ():
            if budget <= 0:
                break
            left = len(request.tokens) - request.n_computed
            if left > 1 and request.state == "running":
                budget -= self._cut(prompts, request, left, budget, empty=not decoding)
        if len(preempted) == displaced:
            self._admit(prompts, budget, empty=not decoding)
        return self._step(now, (*decodes, *prompts), preempted, counted=True)

    def _step(
        self, now: float, chunks: tuple[Chunk, ...], preempted: list[Request], *, counted: bool
    ) -> Step:
        """A step of these chunks, and of the decodes that are ``counted``."""
        decodes = len(self.cohort.members) if counted else 0
        transfers, wait_for = self.preemption.launch(
            now, computing=bool(chunks or decodes), busy=bool(self.requests)
        )
        return Step(
            chunks,
            tuple(preempted),
            transfers,
            wait_for,
            now,
            self._copies(),
            decodes=decodes,
            contexts=self.cohort.contexts if decodes else 0,
        )

    def _copies(self) -> tuple[Copy, ...]:
        """Blocks that forks will write to and others hold: to copy before this step."""
        return self._forking.copies() if self._forking is not None else ()

    def _parent(self, request: Request) -> Request | None:
        """Whose blocks a request can begin with, now or once its prompt is computed."""
        parent = self.requests.get(request.fork_of or "")
        if (
            parent is None
            or self._forking is None
            or request.n_generated
            or request.preemptions  # the host may have more of it, and in whole blocks
            or request.n_prompt != parent.n_prompt
            or (request.adapter, request.salt) != (parent.adapter, parent.salt)
            or request.tokens != parent.tokens[: parent.n_prompt]
        ):
            return None
        return parent

    def _release(self, name: str) -> None:
        """Requests need not stand aside any more for the one of this id."""
        self.waiting.extendleft(reversed(self._forks.pop(name, ())))

    def _forget(self, request: Request, *, keep: bool) -> None:
        self._release(request.id)
        super()._forget(request, keep=keep)

    def _match(self, request: Request) -> None:
        """Give a request what the cache has of it already."""
        parent = self._parent(request)
        if (
            self._forking is not None
            and parent is not None
            and parent.state in _HOLDING
            and parent.n_computed >= request.n_prompt - 1  # it may be computed again just now
        ):
            self._forking.fork(parent, request)
        else:
            self.kv.match_prefix(request)

    def _displace(self) -> list[Request]:
        """Requests preempted for one that waits, before anything is planned: here none."""
        return []

    def _decodes(self, preempted: list[Request]) -> list[Chunk]:
        """One token of every request that generates and is not counted, the oldest first."""
        cohort, most, size = self.cohort, self.limits.max_step_tokens, self.kv.block_size
        count = self._counts and len(self.running) <= most
        if not count:
            for name in [*cohort.members]:
                cohort.leave(name)  # not all may be in this step
        elif full := [*cohort.full]:
            if len(self.running) - len(cohort.members) + len(full) <= self.kv.num_free:
                self.preemption.wait(cohort.grow())
            else:
                for one in full:
                    cohort.leave(one.request.id)  # some may have to give way, the youngest first
        apart: Iterable[Request] = ()
        if len(cohort.members) < len(self.running):
            apart = [one for name, one in self.running.items() if name not in cohort.members]
        chunks: list[Chunk] = []
        for request in apart:
            start = request.n_computed
            if len(request.tokens) != start + 1 or request.state != "running":
                continue
            if len(chunks) == most:
                break
            if start >= len(request.blocks) * size and not self._grow(request, preempted):
                continue
            # Its first token is an output of its own.
            if count and request.n_generated and not request.params.stop_ids:
                cohort.join(request, self.most_cached(request) - start)
            else:
                chunks.append(_chunk((request, start, 1, 0)))
        return self._drafts(chunks, most - len(chunks)) if self.drafting is not None else chunks

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Room for one token more, for which the youngest give way; whether there is."""
        held = len(request.blocks)
        # A request preempted here came later, so it has no part in this step yet.
        while not self.kv.allocate(request, request.n_computed + 1):
            victim = next(reversed(self.running.values()))
            self.lose(victim)
            preempted.append(victim)
            if victim is request:
                return False
        if len(request.blocks) > held:
            self.preemption.wait(request.blocks[held:])
        return True

    def _cut(
        self, prompts: list[Chunk], request: Request, left: int, budget: int, *, empty: bool
    ) -> int:
        """Add what fits of the ``left`` tokens to compute; how many were taken."""
        length = min(left, budget)
        if (
            length < left
            and not self.chunked
            and (left <= self.limits.max_step_tokens or not empty or prompts)
        ):
            return 0
        prompts.append(Chunk(request, request.n_computed, length))
        return length

    def _admit(self, prompts: list[Chunk], budget: int, *, empty: bool) -> None:
        kv = self.kv
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            alone = not self.running
            if not alone and self._refused is not None:
                name, free = self._refused
                if name == request.id and kv.num_free <= free:
                    return
            free = kv.num_free
            self._match(request)
            if not self._place(request, alone=alone):
                kv.free(request)
                self._refused = (request.id, free)
                return
            fetched = self.preemption.fetch(request, len(self.running))
            if fetched == "busy":
                kv.free(request)
                return
            if fetched == "arriving":
                self._start(request)
                continue
            taken = self._cut(
                prompts, request, len(request.tokens) - request.n_computed, budget, empty=empty
            )
            if not taken:
                self.preemption.take(request)
                return
            self._refused = None
            self._start(request)
            budget -= taken

    def _place(self, request: Request, *, alone: bool) -> bool:
        """Give a request blocks for all of its tokens, unless others need the room."""
        kv = self.kv
        if not kv.allocate(request, len(request.tokens)):
            return False
        # Who already holds all it will ever need takes nothing from the others later.
        whole = len(request.blocks) * kv.block_size >= self.most_cached(request)
        return alone or whole or kv.num_free >= self._reserve
