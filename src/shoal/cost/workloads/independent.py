"""Requests that know nothing of each other: only their laws of lengths differ."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw, Positive, Requests, Scale, independent
from shoal.ir import Arrival


@part
class Independent:
    """What such workloads share.

    Args:
        requests: number of requests, unless a command gives another.
        rate: requests per second; None for all requests at time 0.
        burstiness: coefficient of variation of the time between arrivals; 1 is a Poisson process,
            larger values are burstier.
        scale: divisor of all lengths, for small models and machines.
    """

    requests: Requests = 200
    rate: Positive | None = None
    burstiness: Positive = 1.0
    scale: Scale = 1.0

    # Each workload's own.
    NAME: ClassVar[str]
    PROMPTS: ClassVar[LengthLaw]
    OUTPUTS: ClassVar[LengthLaw]

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        return independent(
            self,
            self.PROMPTS,
            self.OUTPUTS,
            purpose=self.NAME,
            count=count,
            vocab_size=vocab_size,
            max_position=max_position,
            seed=seed,
        )
