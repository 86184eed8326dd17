"""Steps that are planned while earlier ones are under way.

A request is in one step at a time: from when its step is planned until that is committed its
state is ``computing``, and schedulers plan only what is ``running``. With several steps under
way each takes its share of the requests that generate; else the first would take all of them,
and nothing would be left to be computed beside it.

Source: Du et al., EnergonAI, 2022, section 4.2 (non-blocking pipeline).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from shoal.core.errors import require
from shoal.ir import Output, Request, Scheduler, Step, StepResult


class OpenScheduler(Scheduler, Protocol):
    """A scheduler that shows who runs, as all do whose books are ``Queues``.

    Attributes:
        running: by id, in the order of admission.
    """

    running: dict[str, Request]


class AheadScheduler:
    """Plans for an engine whose runner has several steps under way; commits in their order.

    Args:
        scheduler: whose steps they are.
        depth: most steps under way.
    """

    def __init__(self, scheduler: OpenScheduler, depth: int) -> None:
        require(depth >= 1, "steps under way", depth, expected="at least 1")
        self._scheduler, self.depth = scheduler, depth
        # Of every step: how often each of its requests had been preempted when it was planned.
        self._planned: deque[tuple[Step, tuple[int, ...]]] = deque()

    @property
    def under_way(self) -> int:
        """Steps that were planned and not committed."""
        return len(self._planned)

    def plan(self, now: float) -> Step:
        """The next step; an empty one if there is nothing to do beside those under way."""
        running = self._scheduler.running.values()
        share = -(-len(running) // self.depth)
        held = [one for one in running if one.state == "running"][share:]
        for request in held:
            request.state = "computing"
        try:
            step = self._scheduler.plan(now)
        finally:
            for request in held:
                if request.state == "computing":  # or it was preempted
                    request.state = "running"
        if step:
            for chunk in step.chunks:
                chunk.request.state = "computing"
            self._planned.append((step, tuple(c.request.preemptions for c in step.chunks)))
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take in what the oldest step gave.

        A request preempted meanwhile is left out: it is computed again from its first token
        on, and this one with it.
        """
        oldest, counts = self._planned.popleft()
        if oldest is not step:
            raise ValueError("steps are committed in the order in which they were planned")
        fresh = tuple(
            chunk
            for chunk, count in zip(step.chunks, counts, strict=True)
            if chunk.request.preemptions == count and chunk.request.state == "computing"
        )
        for chunk in fresh:
            chunk.request.state = "running"
        return self._scheduler.commit(Step(fresh, at=step.at), result, now)
