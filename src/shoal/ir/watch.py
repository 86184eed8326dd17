"""How a training run is watched."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Value


class WatchPolicy(Value):
    """What each rank records about itself.

    Args:
        record: keep a flight recorder of every collective, message and phase.
        events: newest records that are kept.
        beat_s: seconds between heartbeats of the process.
        check_every: steps between matrix products with known results, as a self-check; 0 for never.
    """

    record: bool = True
    events: PositiveInt = 8192
    beat_s: PositiveFloat = 10.0
    check_every: NonNegativeInt = 50
