"""The game as an environment of Gymnasium, ``shoal/MallocGame-v0``.

::

    import gymnasium
    import shoal.plan.mapping.env

    game = gymnasium.make("shoal/MallocGame-v0", program=program, tiers=tiers)

What is seen is that of ``observation``; ``info["action_mask"]`` says which actions are legal. A
reward is the share of the program's slowest time that a decision takes off. An action that is not
legal ends nothing and costs nothing else: the access goes where it may.

Source: Towers et al., Gymnasium: A Standard Interface for Reinforcement Learning Environments,
2024.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.extras import import_extra
from shoal.plan.mapping.game import Game
from shoal.plan.mapping.layout import DROP, NO_COPY, Mapping
from shoal.plan.mapping.observation import OBSERVED, observe
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec
from shoal.plan.mapping.samples import random_program

NAME = "shoal/MallocGame-v0"

_gymnasium = import_extra("gymnasium", extra="gym", purpose="the environment of memory mapping")


class MallocGame(_gymnasium.Env):  # type: ignore[misc,name-defined]
    """One play of a program.

    Args:
        program: what runs; a random one, if not given.
        tiers: on what; a fast memory of 4 MiB, if not given.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, program: MappingProgram | None = None, tiers: TierSpec | None = None
    ) -> None:
        self.compiled = Compiled(program or random_program(), tiers or TierSpec(fast_bytes=1 << 22))
        self.action_space = _gymnasium.spaces.Discrete(3)
        self.observation_space = _gymnasium.spaces.Box(
            -1.0, 5.0, shape=(OBSERVED,), dtype=np.float32
        )
        self._game = Game(self.compiled)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin again, everything in slow memory."""
        super().reset(seed=seed)
        self._game.reset()
        return observe(self._game), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Decide about the next access.

        Raises:
            PlanError: the game is over.
        """
        require(0 <= int(action) <= 2, "action", action, expected="0, 1 or 2", error=PlanError)
        if self._game.done:
            raise PlanError("mapping: all decisions are made; call reset")
        legal = self._game.legal()
        played = int(action)
        if not legal[played]:
            played = DROP if legal[DROP] else NO_COPY
        reward = self._game.step(played) / self.compiled.all_slow
        done = self._game.done
        seen = np.zeros(OBSERVED, np.float32) if done else observe(self._game)
        return seen, reward, done, False, {**self._info(), "action": played}

    def mapping(self) -> Mapping:
        """What the finished game decided.

        Raises:
            PlanError: it is not over.
        """
        return self._game.mapping("environment")

    def _info(self) -> dict[str, Any]:
        legal = (False,) * 3 if self._game.done else self._game.legal()
        return {"action_mask": np.array(legal, np.int8), "ticks": self._game.ticks}


def register() -> None:
    """Make :data:`NAME` known to ``gymnasium.make``, once."""
    if NAME not in _gymnasium.registry:
        _gymnasium.register(id=NAME, entry_point="shoal.plan.mapping.env:MallocGame")


register()
