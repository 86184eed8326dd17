"""What steps take in the engine's own loop: other requests are served before, and timed.

A profile repeats single steps, one after another. In the loop there is work around them, the next
step has another shape, and under little load the caches forget between two requests. So requests
with the same lengths and times and other tokens are served first, a line is fitted to the steps as
they were, and moved to meet their sum: what waits, waits for every interruption as well.

A machine is not the same for long, either. :class:`MachineSpeed` times a few fixed steps: before
and after what is compared, so that a change is seen, and said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core.measure import BackgroundLoad
from shoal.cost.serving.simulator import ServedRequest
from shoal.cost.step_cost.fitted import FEWEST, FittedStepCost, StepSample, fit, scaled
from shoal.ir import Arrival

if TYPE_CHECKING:
    from shoal.serve.bench.profile import Shape
    from shoal.serve.engine.runner import LocalRunner

PULSE: tuple[Shape, ...] = (((0, 64),), ((64, 1),) * 4, ((128, 1),) * 16)
"""Steps that are always the same: a prompt, and few and many decodes."""

STEADY, OTHERS = 0.05, 0.05
"""Shares by which the pulse of a machine may change, and that others may have of its cores, while
it is still called the same machine."""


def others(arrivals: Sequence[Arrival], vocab_size: int) -> list[Arrival]:
    """Requests with the same times and lengths, and as much in common, but other tokens."""
    return [
        dataclasses.replace(one, prompt=tuple((token + 1) % vocab_size for token in one.prompt))
        for one in arrivals
    ]


def opening(served: Sequence[ServedRequest], seconds: float) -> int:
    """How many requests from the first on had all ended after so many s."""
    late = (index for index, one in enumerate(served) if not one.finish <= seconds)
    return next(late, len(served))


def learned(steps: Sequence[StepSample], profiled: Sequence[StepSample] = ()) -> FittedStepCost:
    """A line through steps, which meets the sum of those that were rehearsed.

    Args:
        steps: of the rehearsal, in the loop.
        profiled: steps one after another, of shapes that the rehearsal may not have had.

    Raises:
        ConfigError: too few steps.
    """
    if len(steps) < FEWEST:
        return fit([*profiled, *steps])
    line = fit([*profiled, *steps])
    factor = sum(one.seconds for one in steps) / sum(line.seconds(one.chunks) for one in steps)
    return scaled(line, factor)


class MachineSpeed:
    """How fast the machine is now, and whether other processes use it.

    Args:
        seconds: about how long one look takes.
    """

    def __init__(self, runner: LocalRunner, *, seconds: float = 0.4) -> None:
        self._runner, self._seconds = runner, seconds
        self._elsewhere = BackgroundLoad()

    def take(self) -> tuple[float, float]:
        """(s of the fixed steps, share of all cores that others had since the last look)."""
        from shoal.serve.bench.profile import profile

        busy = self._elsewhere.share()
        taken = sum(one.seconds for one in profile(self._runner, PULSE, seconds=self._seconds))
        self._elsewhere = BackgroundLoad()
        return taken, busy


def spread_of(pulses: Sequence[float]) -> float:
    """By which share the largest is above the smallest."""
    return max(pulses) / min(pulses) - 1
