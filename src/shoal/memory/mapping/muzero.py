"""An agent that plans with a model of the game that it learns while it plays one program.

It plays games by tree search in its own model, learns from them, looks at old games again with
what it knows by then, and keeps the best game that it ever saw.

Source: Schrittwieser et al., Mastering Atari, Go, Chess and Shogi by Planning with a Learned
Model, 2020 (search, appendix B; reanalyse, appendix H); Mandhane et al., Optimizing Memory Mapping
Using Deep Reinforcement Learning, 2023 (the game).
Differs: some games begin with a part of the best game so far; multilayer perceptrons, no
convolutions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import MissingExtraError
from shoal.core.parts import part
from shoal.plan.mapping.layout import Mapping
from shoal.plan.mapping.native import Native, mapping_of
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec


@part
class MuZero:
    """Reinforcement learning by self-play and tree search on one program, without demonstrations.

    Args:
        rounds: rounds of self-play and training.
        moves: decisions of self-play per round, over all its games.
        updates: updates of the networks per round.
        simulations: simulations per search.
        demonstrations: initial training games, made from a known mapping by dropping some of its
            buffers from fast memory.
        hidden: width of hidden layers.
        latent: width of the learned model's state.
        batch: positions per update.
        unroll: decisions over which the learned model is unrolled.
        horizon: decisions whose rewards are in a value target.
        discount: discount of rewards per decision.
        noise: mean share of random priors at the root of a search; drawn for each game.
        rate: learning rate.
    """

    rounds: Annotated[int, Ge(1), Le(1_000_000)] = 12
    moves: Annotated[int, Ge(1), Le(1_000_000)] = 24_000
    updates: Annotated[int, Ge(0), Le(1_000_000)] = 60
    simulations: Annotated[int, Ge(1), Le(1_000_000)] = 50
    demonstrations: Annotated[int, Ge(0), Le(1_000_000)] = 32
    hidden: Annotated[int, Ge(8), Le(1_000_000)] = 64
    latent: Annotated[int, Ge(4), Le(1_000_000)] = 32
    batch: Annotated[int, Ge(1), Le(1_000_000)] = 128
    unroll: Annotated[int, Ge(1), Le(1_000_000)] = 4
    horizon: Annotated[int, Ge(1), Le(1_000_000)] = 16
    discount: Annotated[float, Ge(0.5), Le(0.9999)] = 0.97
    noise: Annotated[float, Ge(0.0), Le(0.5)] = 0.25
    rate: Annotated[float, Ge(0.0), Le(1.0)] = 2e-3

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """Learn the program's game from nothing; the best game is the answer.

        Raises:
            BuildError: there is no C++ compiler; without one a search takes hours.
            MissingExtraError: torch is not installed.
        """
        return self.improve(Compiled(program, tiers), None, seed=seed, name="muzero")

    def improve(
        self, compiled: Compiled, known: np.ndarray | None, *, seed: int, name: str
    ) -> Mapping:
        """The best game of the agent, or what was known if that is better.

        Args:
            compiled: program and memories.
            known: actions [D] of a mapping to learn from first.
            seed: of everything random.
            name: of the mapper.
        """
        native = Native(compiled)
        try:
            from shoal.memory.mapping.learning import MuZeroLearner
        except ModuleNotFoundError as cause:
            if cause.name != "torch":
                raise
            raise MissingExtraError("torch", "run", f"mapper {name}") from None
        result = MuZeroLearner(self, native, seed).run(known)
        return replace(
            mapping_of(compiled, result.best.actions, name),
            notes=(result.note(),),
            details={"rounds": result.curve, "games": result.played},
        )
