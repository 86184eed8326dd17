"""The engine with several steps under way: plan and submit ahead, commit in order.

With one step under way it does what :class:`~shoal.serve.engine.loop.Engine` does.

Source: Du et al., EnergonAI, 2022, section 4.2.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from shoal.ir import Output, QueuedRunner, Step
from shoal.plan.batching.schedulers.ahead import AheadScheduler, OpenScheduler
from shoal.serve.engine.hooks import EngineHook
from shoal.serve.engine.loop import Engine


class AheadEngine(Engine):
    """Requests in, tokens out, by a runner that takes steps before earlier ones are over."""

    def __init__(self, scheduler: OpenScheduler, runner: QueuedRunner, **options: Any) -> None:
        super().__init__(scheduler, runner, **options)
        self._queued = runner
        self._planner = AheadScheduler(scheduler, runner.depth)
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
        self.hooks(EngineHook.before_plan)
        while len(self._under_way) < self._queued.depth and (step := self._plan(self.clock())):
            self._queued.submit(self._extended(step))
            self._under_way.append(step)
        if not self._under_way:
            return []
        result = self._queued.collect()
        step = self._under_way.popleft()
        # Steps overlap: the seconds of each begin when the one before is over.
        outputs = self._commit(step, result, max(step.at, self._committed))
        self._committed = self.clock()
        return outputs
