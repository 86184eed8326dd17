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
