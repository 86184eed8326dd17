"""The engine with several steps under way: plan and submit ahead, commit in order.

With one step under way it does what :class:`~shoal.serve.engine.loop.Engine` does.

Source: Du et al., EnergonAI, 2022, section 4.2.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from shoal.ir import KVManager, Output, QueuedRunner, Step
from shoal.plan.batching.schedulers.ahead import Ahead, Open
from shoal.serve.engine.loop import Engine

__all__ = ["AheadEngine"]


class AheadEngine(Engine):
    """Requests in, tokens out, by a runner that takes steps before earlier ones are over.

    Args:
        scheduler: decides what runs.
        runner: computes it.
        kv: the scheduler's bookkeeping of blocks.
        vocab_size: tokens that the model knows.
        clock: s.
    """

    def __init__(
        self,
        scheduler: Open,
        runner: QueuedRunner,
        *,
        kv: KVManager | None = None,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, runner, kv=kv, vocab_size=vocab_size, clock=clock)
        self._queued = runner
        self._ahead = Ahead(scheduler, runner.depth)
        self._under_way: deque[Step] = deque()
        self._committed = -math.inf

    @property
    def busy(self) -> bool:
        """Whether a step is under way, or there is a request that is not finished."""
        return bool(self._under_way) or super().busy

    def step(self) -> list[Output]:
        """Plan and submit what there is room for, then commit the oldest step.

        Raises:
            ServeError: the runner cannot go on.
        """
        while len(self._under_way) < self._queued.depth:
            step = self._ahead.plan(self.clock())
            self._preemptions += len(step.preempted)
            if not step:
                break
            self.last_chunks = step.chunks
            step = self._scrubbing(step)
            self._queued.submit(step)
            self._under_way.append(step)
        if not self._under_way:
            return []
        result = self._queued.collect()
        step = self._under_way.popleft()
        # Steps overlap: the seconds of each begin when the one before is over.
        started = max(step.at, self._committed)
        outputs = self._commit(step, result, started, self._ahead.commit)
        self._committed = self.clock()
        return outputs
