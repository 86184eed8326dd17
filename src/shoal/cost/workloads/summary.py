"""Summaries: long documents in, short texts out."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw, check_options, independent
from shoal.ir import Arrival

__all__ = ["Summary"]


@part
class Summary:
    """Independent documents of 6000 tokens in the median, summaries of 150.

    Args:
        requests: how many, unless a command says otherwise.
        rate: requests per second; None has all of them at time 0.
        burstiness: standard deviation of the time between arrivals over its mean; 1 is a
            Poisson process, more comes in bursts.
        scale: divides all lengths, for small models and machines.
    """

    requests: int = 50
    rate: float | None = None
    burstiness: float = 1.0
    scale: float = 1.0

    PROMPTS: ClassVar = LengthLaw(6000, 0.5, 64, 60000)
    OUTPUTS: ClassVar = LengthLaw(150, 0.6, 8, 2000)

    def __post_init__(self) -> None:
        check_options("workload.summary", self)

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`."""
        return independent(
            self,
            self.PROMPTS,
            self.OUTPUTS,
            purpose="summary",
            count=count,
            vocab_size=vocab_size,
            max_position=max_position,
            seed=seed,
        )
