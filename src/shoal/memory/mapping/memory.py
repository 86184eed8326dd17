"""Games that were played, and batches of positions of them to learn from."""

from __future__ import annotations

import numpy as np
import torch

from shoal.memory.mapping.networks import GameBatch
from shoal.plan.mapping.native import GameRecord


class Games:
    """The last and the best games of one program.

    Args:
        unit: ticks that are a reward of 1.
        horizon: decisions whose rewards a value target counts before it asks the search.
        unroll: decisions that a batch follows.
        most: games that are kept.
    """

    def __init__(
        self, *, unit: float, discount: float, horizon: int, unroll: int, most: int
    ) -> None:
        self.unit, self.discount = unit, discount
        self.horizon, self.unroll, self.most = horizon, unroll, most
        self.games: list[GameRecord] = []
        self._targets: list[np.ndarray] = []

    def add(self, game: GameRecord) -> None:
        """Keep a game; the oldest that is not among the best goes."""
        self.games.append(game)
        self._targets.append(self._values(game))
        if len(self.games) > self.most:
            keep = sorted(range(len(self.games)), key=lambda i: self.games[i].ticks)
            best = set(keep[: self.most // 4])
            gone = next(i for i in range(len(self.games)) if i not in best)
            del self.games[gone], self._targets[gone]

    def refresh(self, index: int) -> None:
        """Recompute targets after a game was searched again."""
        self._targets[index] = self._values(self.games[index])

    def returns(self, game: GameRecord) -> np.ndarray:
        """Discounted rewards from every decision on, [D]: values where no search was."""
        array = np.zeros(len(game.rewards) + 1)
        for i in range(len(game.rewards) - 1, -1, -1):
            array[i] = game.rewards[i] / self.unit + self.discount * array[i + 1]
        return array[:-1].astype(np.float32)

    def _values(self, game: GameRecord) -> np.ndarray:
        """n-step targets [D]."""
        count, far = len(game.rewards), self.horizon
        rewards = game.rewards / self.unit
        factors = self.discount ** np.arange(far)
        target = np.convolve(np.r_[rewards, np.zeros(far - 1)], factors[::-1], "valid")
        if far < count:
            target[: count - far] += self.discount**far * game.values[far:]
        return target.astype(np.float32)

    def batch(self, size: int, random: np.random.Generator) -> GameBatch:
        """Positions of games, half of them of the best quarter.

        Args:
            size: positions.
            random: which.
        """
        order = np.argsort([game.ticks for game in self.games], kind="stable")
        good = order[: max(1, len(order) // 4)]
        picked = np.where(
            random.random(size) < 0.5, random.choice(good, size), random.choice(order, size)
        )
        count, unroll = len(self.games[0].actions), self.unroll
        start = random.integers(count, size=size)
        steps = start[:, None] + np.arange(unroll + 1)
        inside = steps < count
        steps = np.minimum(steps, count - 1)

        def gathered(arrays: list[np.ndarray], at: np.ndarray) -> np.ndarray:
            return np.stack([arrays[i][row] for i, row in zip(picked, at, strict=True)])

        games = self.games
        shares = gathered([g.shares for g in games], steps) * inside[..., None]
        values = gathered(self._targets, steps) * inside
        rewards = gathered([g.rewards for g in games], steps[:, :-1]) / self.unit * inside[:, :-1]
        return GameBatch(
            torch.from_numpy(
                np.stack([games[i].seen[j] for i, j in zip(picked, start, strict=True)])
            ),
            torch.from_numpy(gathered([g.actions for g in games], steps[:, :-1]).astype(np.int64)),
            torch.from_numpy(shares.astype(np.float32)),
            torch.from_numpy(values.astype(np.float32)),
            torch.from_numpy(rewards.astype(np.float32)),
        )
