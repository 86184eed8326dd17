"""Shared prefix: requests that start with one of a few long instructions."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.workloads.drawing import (
    LengthLaw,
    check_options,
    check_sizes,
    independent,
    token_ids,
)
from shoal.ir import Arrival

__all__ = ["SharedPrefix"]


@part
class SharedPrefix:
    """Each prompt is one of a few long prefixes and a question of its own.

    Args:
        requests: how many, unless a command says otherwise.
        rate: requests per second; None has all of them at time 0.
        burstiness: standard deviation of the time between arrivals over its mean; 1 is a
            Poisson process, more comes in bursts.
        scale: divides all lengths, for small models and machines.
        prefixes: different prefixes, each as likely as the others.
        prefix_tokens: tokens of a prefix.
    """

    requests: int = 200
    rate: float | None = None
    burstiness: float = 1.0
    scale: float = 1.0
    prefixes: int = 4
    prefix_tokens: int = 1024

    QUESTIONS: ClassVar = LengthLaw(60, 0.6, 8, 400)
    OUTPUTS: ClassVar = LengthLaw(120, 1.0, 4, 800)

    def __post_init__(self) -> None:
        where = "workload.shared_prefix"
        check_options(where, self)
        require(self.prefixes >= 1, f"{where}.prefixes", self.prefixes, expected="1 or more")
        require(
            self.prefix_tokens >= 1,
            f"{where}.prefix_tokens",
            self.prefix_tokens,
            expected="1 or more",
        )

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
        """See :class:`~shoal.cost.workloads.protocols.Workload`."""
        check_sizes(count, vocab_size, max_position)
        size = max(1, round(self.prefix_tokens / self.scale))
        starts = [
            token_ids(size, vocab_size, seed, purpose="shared prefix", index=index)
            for index in range(self.prefixes)
        ]

        def choose(random: np.random.Generator) -> tuple[int, ...]:
            return starts[int(random.integers(self.prefixes))]

        return independent(
            self,
            self.QUESTIONS,
            self.OUTPUTS,
            purpose="shared prefix question",
            count=count,
            vocab_size=vocab_size,
            max_position=max_position,
            seed=seed,
            prefix=choose,
        )
