"""Shared prefix: requests that start with one of a few long instructions."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.cost.workloads.drawing import (
    LengthLaw,
    Positive,
    Requests,
    Scale,
    check_sizes,
    independent,
    token_ids,
)
from shoal.ir import Arrival


@part
class SharedPrefix:
    """Each prompt is one of a few long prefixes followed by its own question.

    Args:
        requests: number of requests, unless a command gives another.
        rate: requests per second; None for all requests at time 0.
        burstiness: coefficient of variation of the time between arrivals; 1 is a Poisson process,
            larger values are burstier.
        scale: divisor of all lengths, for small models and machines.
        prefixes: number of different prefixes, drawn with equal probability.
        prefix_tokens: tokens of a prefix.
    """

    requests: Requests = 200
    rate: Positive | None = None
    burstiness: Positive = 1.0
    scale: Scale = 1.0
    prefixes: Annotated[int, Ge(1)] = 4
    prefix_tokens: Annotated[int, Ge(1)] = 1024

    QUESTIONS: ClassVar = LengthLaw(60, 0.6, 8, 400)
    OUTPUTS: ClassVar = LengthLaw(120, 1.0, 4, 800)

    def arrivals(
        self, *, count: int | None, vocab_size: int, max_position: int, seed: int
    ) -> list[Arrival]:
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
