"""The networks of MuZero as small multilayer perceptrons, and how they learn from games.

Representation h: what is seen -> state. Dynamics g: state and action -> next state and reward.
Prediction f: state -> logits of the actions and value. The search evaluates the same matrices in
C++, so their order and their arithmetic are those of ``plan/mapping/game.cpp``.
Shapes: B games' positions, O numbers seen, H hidden, Z of a state, K steps unrolled.

Source: Schrittwieser et al., Mastering Atari, Go, Chess and Shogi by Planning with a Learned
Model, 2020, equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.plan.mapping.native import NetworkWeights
from shoal.plan.mapping.observation import OBSERVED

# Of the three losses, against each other.
_VALUE, _REWARD = 1.0, 4.0


@dataclass(frozen=True)
class GameBatch:
    """Positions of games and what followed them.

    Args:
        seen: observations, [B, O].
        actions: played from there on, [B, K].
        shares: visits of the search, [B, K + 1, 3]; zeros past the end of a game.
        values: targets, [B, K + 1].
        rewards: of the actions, [B, K].
    """

    seen: Tensor
    actions: Tensor
    shares: Tensor
    values: Tensor
    rewards: Tensor


class Networks(nn.Module):
    """The three networks.

    Args:
        generator: of first weights.
    """

    def __init__(
        self, *, hidden: int, latent: int, discount: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.hidden, self.latent, self.discount = hidden, latent, discount
        shapes = (
            (OBSERVED, hidden),
            (hidden, latent),
            (latent + 3, hidden),
            (hidden, latent),
            (hidden, 1),
            (latent, hidden),
            (hidden, 4),
        )
        self.matrices = nn.ParameterList()
        for i, (inner, out) in enumerate(shapes):
            matrix = torch.randn(inner + 1, out, generator=generator) * inner**-0.5
            matrix[-1] = 0.0
            # Rewards, values and policy begin with nothing to say.
            self.matrices.append(nn.Parameter(matrix * (0.1 if i in (4, 6) else 1.0)))

    def _linear(self, index: int, x: Tensor) -> Tensor:
        matrix = self.matrices[index]
        return torch.addmm(matrix[-1], x, matrix[:-1])

    @staticmethod
    def _squash(x: Tensor) -> Tensor:
        return F.softsign(x)

    def represent(self, seen_BO: Tensor) -> Tensor:
        """First state [B, Z]."""
        return self._squash(self._linear(1, self._linear(0, seen_BO).relu()))

    def dynamics(self, state_BZ: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        """Next state [B, Z] and reward [B]."""
        joined = torch.cat([state_BZ, F.one_hot(action_B, 3).to(state_BZ.dtype)], -1)
        inner = self._linear(2, joined).relu()
        return self._squash(self._linear(3, inner) + state_BZ), self._linear(4, inner)[:, 0]

    def predict(self, state_BZ: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of actions [B, 3] and value [B]."""
        out = self._linear(6, self._linear(5, state_BZ).relu())
        return out[:, :3], out[:, 3]

    def loss(self, batch: GameBatch) -> Tensor:
        """Of policy, value and reward over all steps that are unrolled."""
        state = self.represent(batch.seen)
        total = torch.zeros(())
        steps = batch.actions.shape[1]
        for k in range(steps + 1):
            logits, value = self.predict(state)
            policy = -(batch.shares[:, k] * logits.log_softmax(-1)).sum(-1).mean()
            part = policy + _VALUE * F.mse_loss(value, batch.values[:, k])
            total = total + part * (1.0 if k == 0 else 1.0 / steps)
            if k < steps:
                state, reward = self.dynamics(state, batch.actions[:, k])
                total = total + _REWARD / steps * F.mse_loss(reward, batch.rewards[:, k])
                # Half the gradient, so that far steps do not drown the near ones.
                state = 0.5 * state + 0.5 * state.detach()
        return total

    def weights(self) -> NetworkWeights:
        """As the search takes them."""
        flat = torch.cat([matrix.detach().reshape(-1) for matrix in self.matrices])
        array = np.ascontiguousarray(flat.numpy(), np.float32)
        return NetworkWeights(array, self.hidden, self.latent, self.discount)
