"""What runs on a machine taught about predicted times: a factor, and how much is left unknown."""

from __future__ import annotations

from pydantic import Field, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.ir.estimate import Interval


class Correction(Value):
    """By what a predicted time is multiplied on a machine, for one engine.

    Args:
        engine: the program that ran the jobs.
        quantity: step_s of training; tpot and ttft of serving.
        model: the model that it holds for; empty for all models without one of their own.
        factor: of the time.
        width: of the logarithm of the interval.
        runs: that it comes from.
    """

    engine: str
    quantity: str
    model: str = ""
    factor: PositiveFloat = Field(ge=1e-3, le=1e3)
    width: PositiveFloat = Field(le=1e3)
    runs: PositiveInt

    def of(self, time: Interval) -> Interval:
        """The interval of a time, corrected."""
        value = time.value * self.factor
        return Interval(
            value=value,
            low=value * (time.low / time.value) ** self.width if time.value else 0.0,
            high=value * (time.high / time.value) ** self.width if time.value else 0.0,
        )
