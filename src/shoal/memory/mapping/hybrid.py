"""The compiler's mapping, and an agent that learns to do better.

Source: Mandhane et al., Optimizing Memory Mapping Using Deep Reinforcement Learning, 2023
(the agent beside the heuristic of production, and the better of the two).
"""

from __future__ import annotations

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.memory.mapping.muzero import MuZero
from shoal.plan.mapping.greedy import greedy_actions
from shoal.plan.mapping.layout import Mapping
from shoal.plan.mapping.program import Compiled, Program, TierSpec

__all__ = ["Hybrid"]


@part
class Hybrid(MuZero):
    """MuZero that learns from the greedy mapping first; never slower than greedy.

    Args:
        retries: how many cheaper candidates one of the greedy mapper may push out.
    """

    retries: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.retries <= 64, "mapper.hybrid.retries", self.retries, expected="0 to 64")

    def map(self, program: Program, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """The best of greedy, its demonstrations and all games of the agent.

        Raises:
            BuildError: there is no C++ compiler; without one a search takes hours.
            MissingExtraError: torch is not installed.
        """
        compiled = Compiled(program, tiers)
        known = greedy_actions(compiled, self.retries)
        return self.improve(compiled, known, seed=seed, name="hybrid")
