"""First come, first served, with continuous batching and chunked prompts.

Requests join and leave at every step. A step has one token of every request that
generates, and what is left of the token budget goes to prompts, cut where it ends. When
the cache is full, the request that came last gives its blocks back. It is computed again
later, or its keys and values wait on the host, as the preemption decides; while they
arrive, the others run.

All running requests came before all waiting ones, at any time: admission takes from the
head of the queue only, and preemption puts the youngest running request back there. So
nobody is overtaken, the oldest request always runs, and one that fits alone finishes.

Sources: Yu et al., Orca, 2022 (iteration-level scheduling); Agrawal et al.,
Sarathi-Serve, 2024 (chunked prompts beside decodes); Kwon et al., PagedAttention, 2023,
section 4.5 (preemption by recomputation and by swapping).
"""

from __future__ import annotations

from shoal.core.errors import ServeError, require
from shoal.core.parts import part
from shoal.ir import Chunk, KVManager, Limits, Preemption, Request, Step
from shoal.plan.batching.common import Queues

__all__ = ["Fcfs", "FcfsScheduler"]


@part
class Fcfs:
    """Continuous batching in the order of arrival.

    Args:
        chunked: a prompt may be cut to fit a step; otherwise it waits until a step has room
            for all of it (what is computed again after preemption may still be cut).
        watermark: share of the cache that stays free when a request joins others, so that
            they can grow.
    """

    chunked: bool = True
    watermark: float = 0.01

    def __post_init__(self) -> None:
        require(
            0 <= self.watermark < 1,
            "scheduler.fcfs.watermark",
            self.watermark,
            expected="a share in [0, 1)",
        )

    def build(
        self, kv: KVManager, limits: Limits, preemption: Preemption | None = None
    ) -> FcfsScheduler:
        """See :class:`~shoal.ir.serving.SchedulerPart`."""
        return FcfsScheduler(kv, limits, preemption, chunked=self.chunked, watermark=self.watermark)


class FcfsScheduler(Queues):
    """The scheduler that :class:`Fcfs` builds.

    Args:
        kv: bookkeeping of the cache.
        limits: what to keep to.
        preemption: what becomes of a cache that is taken away.
        chunked: prompts may be cut.
        watermark: share of the cache to leave free on admission.
    """

    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
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

    def add(self, request: Request) -> None:
        """See :class:`~shoal.ir.serving.Scheduler`."""
        require(
            self.chunked or len(request.tokens) <= self.limits.max_step_tokens,
            f"request {request.id}: prompt tokens",
            len(request.tokens),
            expected=f"at most max_step_tokens = {self.limits.max_step_tokens}, since prompts "
            "are not cut",
            hint="shorten the prompt, raise max_step_tokens, or set scheduler.chunked = true",
            error=ServeError,
        )
        super().add(request)

    def plan(self, now: float) -> Step:
        """See :class:`~shoal.ir.serving.Scheduler`."""
        preempted = self._displace()
        displaced = len(preempted)
        decodes = self._decodes(preempted)
        budget = self.limits.max_step_tokens - len(decodes)
        prompts: list[Chunk] = []
        for request in self.running.values():
            if budget <= 0:
                break
            left = len(request.tokens) - request.n_computed
            if left > 1 and request.state == "running":
                budget -= self._cut(prompts, request, left, budget, empty=not decodes)
        if len(preempted) == displaced:
            self._admit(prompts, budget, empty=not decodes)
        chunks = (*decodes, *prompts)
        transfers, wait_for = self.preemption.launch(
            now, computing=bool(chunks), busy=bool(self.requests)
        )
        return Step(chunks, tuple(preempted), transfers, wait_for, now)

    def _displace(self) -> list[Request]:
        """Who makes room for somebody that waits, before anything is planned: here nobody."""
        return []

    def _decodes(self, preempted: list[Request]) -> list[Chunk]:
        """One token of every request that generates, the oldest first."""
        kv, most = self.kv, self.limits.max_step_tokens
        size = kv.block_size
        chunks: list[Chunk] = []
        for request in list(self.running.values()):
            if len(chunks) >= most:
                break
            start = request.n_computed
            stop = start + 1
            if len(request.tokens) != stop or request.state != "running":
                continue
            held = len(request.blocks)
            # Whoever is preempted here came later, so it has no chunk in this step yet.
            while stop > held * size and not kv.allocate(request, stop):
                victim = next(reversed(self.running.values()))
                self.lose(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                if len(request.blocks) > held:
                    self.preemption.wait(request.blocks[held:])
                chunks.append(Chunk(request, start, 1))
        return chunks

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
            kv.match_prefix(request)
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
