"""Code completion: prompts of similar length, short outputs."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.cost.workloads.drawing import LengthLaw, check_options, independent
from shoal.ir import Arrival

__all__ = ["Code"]


@part
class Code:
    """Independent completions of code: prompts of 165 tokens, outputs of 55 in the median.

    Args:
        requests: how many, unless a command says otherwise.
        rate: requests per second; None has all of them at time 0.
        burstiness: standard deviation of the time between arrivals over its mean; 1 is a
            Poisson process, more comes in bursts.
        scale: divides all lengths, for small models and machines.
    """

    requests: int = 200
    rate: float | None = None
    burstiness: float = 1.0
    scale: float = 1.0

    PROMPTS: ClassVar = LengthLaw(165, 0.45, 30, 600)
    OUTPUTS: ClassVar = LengthLaw(55, 0.7, 8, 400)

    def __post_init__(self) -> None:
        check_options("workload.code", self)

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`."""
        return independent(
            self,
            self.PROMPTS,
            self.OUTPUTS,
            purpose="code",
            count=count,
            vocab_size=vocab_size,
            max_position=max_position,
            seed=seed,
        )
