"""The loop of playing and learning of :class:`~shoal.memory.mapping.muzero.MuZero`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shoal.core.random import generator, seed64
from shoal.memory.mapping.memory import Games
from shoal.memory.mapping.networks import Networks
from shoal.plan.mapping.layout import DROP
from shoal.plan.mapping.native import FAST, GameRecord, Native

if TYPE_CHECKING:
    from shoal.memory.mapping.muzero import MuZero

# Of the games of a round, the share that begins with a part of the best game.
_CONTINUED = 0.5
# Old games that a round looks at again.
_REANALYSED = 4
_CLIP = 5.0
# Games of a round at least, and games that are kept.
_GAMES = 8
_KEPT = 256


class MuZeroLearner:
    """One agent on one program.

    Attributes:
        best: the best game that was ever seen.
        curve: mean ticks of the whole games of each round.
        played: games of self-play.
    """

    def __init__(self, options: MuZero, native: Native, seed: int) -> None:
        self.options, self.native, self.seed = options, native, seed
        c = native.compiled
        worth = max(1, c.all_slow - c.all_fast) / c.decisions
        self.games = Games(
            unit=worth / (1.0 - options.discount),
            discount=options.discount,
            horizon=options.horizon,
            unroll=options.unroll,
            most=_KEPT,
        )
        self.networks = Networks(
            hidden=options.hidden,
            latent=options.latent,
            discount=options.discount,
            generator=torch.Generator().manual_seed(seed64(seed, purpose="mapping.weights")),
        )
        self._adam = torch.optim.AdamW(
            self.networks.parameters(), lr=options.rate, weight_decay=1e-4
        )
        self._random = generator(seed, purpose="mapping.learning")
        self.best = self._with_returns(native.trace(np.zeros(c.decisions, np.int8)))
        self.known: int | None = None
        self.curve: list[float] = []
        self.played = 0

    def run(self, known: np.ndarray | None) -> MuZeroLearner:
        """Demonstrations, then rounds of playing, looking back and learning."""
        self._demonstrate(known)
        self._learn(4 * self.options.updates)
        for index in range(self.options.rounds):
            self._play(index)
            self._look_back()
            self._learn(self.options.updates)
        self._consider(self._search(0.0, 0.0, None))
        return self

    def note(self) -> str:
        """What there is to say."""
        text = f"{self.played} games of self-play"
        if self.known is not None:
            gain = 100.0 * (self.known / self.best.ticks - 1.0)
            text += f"; {gain:.2f} % faster than what it began with"
        return text

    def _with_returns(self, game: GameRecord) -> GameRecord:
        """A game played without search: its own returns are its values."""
        game.values[:] = self.games.returns(game)
        return game

    def _consider(self, game: GameRecord) -> None:
        if game.ticks < self.best.ticks:
            self.best = game

    def _demonstrate(self, known: np.ndarray | None) -> None:
        """Games to learn from first: what is known, with some of it dropped again.

        Without anything known, all decisions ask for fast memory.
        """
        c = self.native.compiled
        wanted = np.full(c.decisions, FAST, np.int8) if known is None else known
        for index in range(self.options.demonstrations + 1):
            tried = wanted.copy()
            if index or known is None:
                share = self._random.random() * (0.2 if known is not None else 1.0)
                tried[self._random.random(c.decisions) < share] = DROP
            actions, _ = self.native.replay(tried)
            game = self._with_returns(self.native.trace(actions))
            self.games.add(game)
            self._consider(game)
            if index == 0 and known is not None:
                self.known = game.ticks

    def _play(self, index: int) -> None:
        options = self.options
        late = index / max(1, options.rounds - 1)
        temperature = 1.0 - 0.75 * late
        whole: list[float] = []
        count = max(_GAMES, options.moves // len(self.best.actions))
        for number in range(count):
            given = None
            if number < _CONTINUED * count:
                start = int(self._random.integers(len(self.best.actions)))
                given = self.best.actions[:start]
            noise = 2.0 * options.noise * self._random.random()
            game = self._search(temperature, noise, given)
            self.games.add(game)
            self._consider(game)
            if given is None:
                whole.append(float(game.ticks))
        self.curve.append(float(np.mean(whole)) if whole else float(self.best.ticks))

    def _search(self, temperature: float, noise: float, given: np.ndarray | None) -> GameRecord:
        self.played += 1
        return self.native.play(
            self.networks.weights(),
            simulations=self.options.simulations,
            temperature=temperature,
            noise=noise,
            seed=seed64(self.seed, purpose="mapping.play", index=self.played),
            given=given,
        )

    def _look_back(self) -> None:
        weights = self.networks.weights()
        count = len(self.games.games)
        for index in self._random.choice(count, min(count, _REANALYSED), replace=False).tolist():
            game = self.games.games[index]
            self.native.reanalyse(
                weights,
                game,
                simulations=self.options.simulations,
                seed=seed64(self.seed, purpose="mapping.look", index=self.played + index),
            )
            self.games.refresh(index)

    def _learn(self, updates: int) -> None:
        for _ in range(updates):
            loss = self.networks.loss(self.games.batch(self.options.batch, self._random))
            self._adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.networks.parameters(), _CLIP)
            self._adam.step()
