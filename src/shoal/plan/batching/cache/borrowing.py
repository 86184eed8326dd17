"""What one instance does around its steps where instances lend each other memory.

The same for an engine and for a simulation: how the instance is, which blocks to copy away beside
the steps, how much of a step has memory, and what is computed again when a lender is gone. Nothing
here copies, waits or reads a clock.

Source: Lin et al., Infinite-LLM, 2024, section 4.2 (rManager).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.ir import Chunk, Request, Step
from shoal.plan.batching.cache.distributed import BlockLoan, DistributedBlocks
from shoal.plan.batching.cache.loans import InstanceStatus
from shoal.plan.batching.common import Queues


class Borrower:
    """An instance's side of lending.

    Args:
        scheduler: owns its requests.
        kv: its books.
        instance: its number.
        node: where it is.
    """

    def __init__(
        self, scheduler: Queues, kv: DistributedBlocks, instance: int, *, node: str = ""
    ) -> None:
        self.scheduler, self.kv = scheduler, kv
        self.instance, self.node = instance, node

    def beat(self) -> InstanceStatus:
        """How this instance is."""
        head = next(iter(self.scheduler.waiting), None)
        return InstanceStatus(
            instance=self.instance,
            lendable=self.kv.num_lendable,
            short=self.kv.short if head is not None else 0,
            waiting=len(head.tokens) if head is not None else 0,
            ahead=max(0, self.ahead() - self.kv.num_free),
            contexts=tuple(len(one.tokens) for one in self.scheduler.running.values()),
            borrowed=self.kv.borrowed,
            node=self.node,
        )

    def ahead(self) -> int:
        """Blocks to have free for requests that run: a part of what they will still take."""
        running = self.scheduler.running.values()
        size = self.kv.block_size
        left = sum(-(-self.scheduler.most_cached(one) // size) - len(one.blocks) for one in running)
        return min(left, 2 + len(running))

    def lends(self) -> list[BlockLoan]:
        """Blocks to copy away beside the steps, so that the next ones have memory."""
        step_blocks = self.scheduler.limits.max_step_tokens // self.kv.block_size + 1
        wanted = min(self.kv.num_promised, step_blocks) + self.ahead() - self.kv.num_local
        return self.kv.begin(wanted) if wanted > 0 else []

    def returns(self) -> dict[int, list[int]]:
        """Blocks to return now, by instance: unused, or more than needed."""
        if not self.scheduler.waiting:
            self.kv.spare(2 * self.ahead())
        return self.kv.returns()

    def fit(self, step: Step, room: Callable[[Request, int], int]) -> Step:
        """The step with as much of its chunks as has memory.

        Args:
            step: as it was planned.
            room: request and tokens -> how many of them have memory, once what can be copied
                away has been.
        """
        chunks: list[Chunk] = []
        for chunk in step.chunks:
            stop = room(chunk.request, chunk.stop)
            if stop >= chunk.stop:
                chunks.append(chunk)
            elif stop > chunk.start:
                chunks.append(Chunk(chunk.request, chunk.start, stop - chunk.start))
        return replace(step, chunks=tuple(chunks))

    def give_way(self) -> None:
        """Nothing of a step has memory and nothing can be copied away: the newest is lost."""
        self.scheduler.lose(next(reversed(self.scheduler.running.values())))

    def missing(self, request: Request, stop: int) -> tuple[int, list[BlockLoan]]:
        """Tokens of a request, up to ``stop``, that have memory; and what to copy for the rest."""
        backed = self.kv.back(request, stop)
        if backed >= stop:
            return stop, []
        size = self.kv.block_size
        return backed, self.kv.begin(-(-stop // size) - backed // size, first=request)

    def recall(self, creditor: int, blocks: int) -> None:
        """A lender wants blocks back: requests that use some of it are computed again."""
        for request in self.kv.recall(creditor, blocks):
            self.scheduler.lose(request)

    def lose(self, instance: int) -> None:
        """An instance is gone: what it held is computed again."""
        for request in self.kv.using(instance):
            self.scheduler.lose(request)
        self.kv.lost(instance)
        for request in self.kv.overdrawn():
            self.scheduler.lose(request)
