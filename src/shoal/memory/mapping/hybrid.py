"""The compiler's mapping, local search, and an agent that learns from the better of them.

Source: Mandhane et al., Optimizing Memory Mapping Using Deep Reinforcement Learning, 2023
(the agent beside the heuristic of production, and the better of the two).
Differs: the agent learns from what simulated annealing finds where that is better.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.memory.mapping.muzero import MuZero
from shoal.plan.mapping.anneal import Anneal
from shoal.plan.mapping.greedy import greedy_actions
from shoal.plan.mapping.layout import Mapping
from shoal.plan.mapping.native import replayer
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec

HOT = 1e-2
"""Share of the time by which a change may hurt in the beginning."""


@part
class HybridMapper(MuZero):
    """MuZero initialized from the greedy or annealed mapping; returns the fastest of all.

    Args:
        retries: largest number of cheaper candidates that one of the greedy mapper may evict.
        changes: changes of simulated annealing before self-play; 0 for none.
    """

    retries: Annotated[int, Ge(0), Le(64)] = 4
    changes: Annotated[int, Ge(0), Le(10**7)] = 60_000

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """The best of greedy, annealing, their demonstrations and all games of the agent.

        Raises:
            BuildError: there is no C++ compiler; without one a search takes hours.
            MissingExtraError: torch is not installed.
        """
        compiled = Compiled(program, tiers)
        known = greedy_actions(compiled, self.retries)
        if self.changes:
            # From nothing, and hotter than alone: it has to leave what greedy would find.
            search = Anneal(rounds=self.changes, hot=HOT)
            result = search.improved(compiled, np.zeros(compiled.decisions, np.int8), seed)
            play = replayer(compiled)
            known = min(known, result, key=lambda actions: play(actions)[1])
        return self.improve(compiled, known, seed=seed, name="hybrid")
