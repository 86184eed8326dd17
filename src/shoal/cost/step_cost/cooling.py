"""Steps after a pause take longer: what they read has left the caches meanwhile.

Caches that cores and guests share forget a model within some milliseconds of idling, and it
takes a few steps until all of it is back. So an engine under little load is slower per step
than the same engine under much, and a profile of steps one after another shows neither.

Coldness lies in [0, 1]. A pause of t s leaves ``1 - (1 - coldness) exp(-t / tau)``; a step takes
``cold_s`` times the coldness longer and leaves a share ``keeps`` of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import NonNegativeFloat, PositiveFloat

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.cost.step_cost.fitted import FEATURES, FEWEST, FittedStepCost, StepSample, features, fit

# Of pauses and of steps, the pairs that are tried.
_TAUS = (0.003, 0.01, 0.03, 0.1)
_KEEPS = (0.0, 0.35, 0.65, 0.85)


class Cooling(Value):
    """How much longer steps take after a pause.

    Args:
        cold_s: additional s of a step with cold caches.
        tau_s: s of a pause after which a share 1/e is left.
        keeps: share of the effect that remains after a step.
    """

    cold_s: NonNegativeFloat
    tau_s: PositiveFloat
    keeps: NonNegativeFloat


class Warmth:
    """The caches of one instance."""

    def __init__(self, cooling: Cooling) -> None:
        self._cooling, self._cold = cooling, 0.0

    def step(self, pause_s: float) -> float:
        """How much longer a step takes after a pause, s."""
        self._cold = 1 - (1 - self._cold) * math.exp(-pause_s / self._cooling.tau_s)
        longer = self._cooling.cold_s * self._cold
        self._cold *= self._cooling.keeps
        return longer


def fit_cooling(runs: Sequence[Sequence[StepSample]]) -> tuple[FittedStepCost, Cooling]:
    """A line through steps, and what pauses add to it, by relative errors.

    Args:
        runs: steps as they followed each other, with the pauses before them; of each instance
            by itself.

    Raises:
        ConfigError: too few steps, or one whose time is not positive.
    """
    import numpy as np
    from scipy.optimize import nnls

    steps = [step for run in runs for step in run]
    require(len(steps) > FEWEST, "steps", len(steps), expected=f"more than {FEWEST}")
    best = fit(steps), Cooling(cold_s=0.0, tau_s=_TAUS[0], keeps=0.0)
    measured = np.array([step.seconds for step in steps])
    rows = np.array([features(step.chunks) for step in steps])
    least = float("inf")
    for tau in _TAUS:
        for keeps in _KEEPS:
            unit = Cooling(cold_s=1.0, tau_s=tau, keeps=keeps)
            cold: list[float] = []
            for run in runs:
                warmth = Warmth(unit)
                cold += [warmth.step(step.pause_s) for step in run]
            weighted = np.column_stack([rows, cold]) / measured[:, None]
            size = np.abs(weighted).max(axis=0)
            size[size == 0] = 1.0
            result, error = nnls(weighted / size, np.ones(len(steps)))
            if error < least:
                least = error
                *line, cold_s = map(float, result / size)
                best = (
                    FittedStepCost(**dict(zip(FEATURES, line, strict=True)), samples=len(steps)),
                    unit.model_copy(update={"cold_s": cold_s}),
                )
    return best
