"""Simulated annealing over what every access wants.

Source: Kirkpatrick et al., Optimization by Simulated Annealing, 1983.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.plan.mapping.greedy import GreedyMapper
from shoal.plan.mapping.layout import COPY, Mapping
from shoal.plan.mapping.native import FAST, mapping_of, replayer
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec


@part
class Anneal:
    """Simulated annealing of the placement of one buffer at a time.

    Args:
        rounds: number of changes to try.
        hot: initial temperature, as a share of the program's time.
        cold: final temperature, as a share of the program's time.
    """

    rounds: Annotated[int, Ge(1), Le(10**7)] = 20_000
    hot: float = 1e-3
    cold: float = 1e-6

    def __post_init__(self) -> None:
        require(
            0 < self.cold <= self.hot <= 1,
            "mapper.anneal.cold",
            self.cold,
            expected=f"above 0 and at most hot, {self.hot:g}, which is at most 1",
        )

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """Begin with everything in slow memory; the best that was seen is the answer.

        Where so few rounds do not reach what the greedy mapper does, begin with that.
        """
        compiled = Compiled(program, tiers)
        wanted = np.zeros(compiled.decisions, np.int8)
        result = mapping_of(compiled, self.improved(compiled, wanted, seed), "anneal")
        greedy = GreedyMapper().map(program, tiers)
        if result.ticks > greedy.ticks:
            wanted = np.array(greedy.actions, np.int8)
            result = mapping_of(compiled, self.improved(compiled, wanted, seed), "anneal")
        return result

    def improved(self, compiled: Compiled, wanted: np.ndarray, seed: int) -> np.ndarray:
        """The best actions [D] that were seen; never worse than what was given."""
        play = replayer(compiled)
        random = generator(seed, purpose="mapping.anneal")
        following = compiled.following.tolist()
        best, now = play(wanted)
        least = now
        for index in range(self.rounds):
            warm = self.hot * (self.cold / self.hot) ** (index / self.rounds)
            changed = wanted.copy()
            k, kind = int(random.integers(compiled.decisions)), int(random.integers(4))
            while k >= 0:
                changed[k] = kind
                # After a copy the buffer is there.
                kind = FAST if kind == COPY else kind
                k = following[k] if random.random() < 0.5 else -1
            actions, ticks = play(changed)
            worse = (ticks - now) / compiled.all_slow
            if worse <= 0 or random.random() < math.exp(-worse / warm):
                wanted, now = changed, ticks
                if now < least:
                    best, least = actions, now
        return best
