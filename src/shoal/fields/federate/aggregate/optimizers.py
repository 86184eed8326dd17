"""The server's own optimizer: the combined update is its gradient.

Source: Reddi et al., Adaptive Federated Optimization, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part


@part
class ServerSgd:
    """Subtract the combined update; FedAvg with a step of 1.

    Args:
        lr: step.
        momentum: of the server (FedAvgM).
    """

    lr: Annotated[float, Gt(0)] = 1.0
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0

    def start(self, size: int) -> ServerSgdState:
        """Without a velocity."""
        return ServerSgdState(self, size)


class ServerSgdState:
    """The velocity, if there is momentum."""

    def __init__(self, part: ServerSgd, size: int) -> None:
        self._part = part
        self._velocity = np.zeros(size, np.float32) if part.momentum else None

    def apply(self, model: np.ndarray, direction: np.ndarray) -> None:
        """A step."""
        if self._velocity is not None:
            self._velocity *= np.float32(self._part.momentum)
            self._velocity += direction
            direction = self._velocity
        model -= np.float32(self._part.lr) * direction

    def state(self) -> dict[str, np.ndarray]:
        """The velocity."""
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on with it."""
        if self._velocity is not None:
            self._velocity = state["velocity"].copy()


@part
class ServerAdam:
    """FedAdam: steps scaled by the root of the mean square of combined updates.

    Without correction of the bias of the first steps, as in the paper.

    Args:
        lr: step.
        b1: share of the old mean of updates that is kept.
        b2: share of the old mean of squares that is kept.
        tau: added to the root; the larger, the less the steps of parameters differ.
    """

    lr: Annotated[float, Gt(0)] = 0.01
    b1: Annotated[float, Ge(0), Lt(1)] = 0.9
    b2: Annotated[float, Ge(0), Lt(1)] = 0.99
    tau: Annotated[float, Gt(0)] = 1e-3

    def start(self, size: int) -> AdaptiveState:
        """Without means."""
        return AdaptiveState(self, size)

    def squares(self, mean: np.ndarray, square: np.ndarray) -> None:
        """Move the mean of squares float32 [P] in place: an exponential mean."""
        mean *= np.float32(self.b2)
        mean += np.float32(1 - self.b2) * square


@part
class ServerYogi:
    """FedYogi: as FedAdam, with a mean of squares that falls slowly where updates get smaller.

    Args:
        lr: step.
        b1: share of the old mean of updates that is kept.
        b2: 1 minus the share of a square by which the mean of squares moves.
        tau: added to the root; the larger, the less the steps of parameters differ.
    """

    lr: Annotated[float, Gt(0)] = 0.01
    b1: Annotated[float, Ge(0), Lt(1)] = 0.9
    b2: Annotated[float, Ge(0), Lt(1)] = 0.99
    tau: Annotated[float, Gt(0)] = 1e-3

    def start(self, size: int) -> AdaptiveState:
        """Without means."""
        return AdaptiveState(self, size)

    def squares(self, mean: np.ndarray, square: np.ndarray) -> None:
        """Move the mean of squares float32 [P] in place, by a share of the new square."""
        mean -= np.float32(1 - self.b2) * square * np.sign(mean - square)


class AdaptiveState:
    """Means of updates and of their squares; the latter begin at the square of tau."""

    def __init__(self, part: ServerAdam | ServerYogi, size: int) -> None:
        self._part = part
        self._mean = np.zeros(size, np.float32)
        self._squares = np.full(size, part.tau**2, np.float32)

    def apply(self, model: np.ndarray, direction: np.ndarray) -> None:
        """A step."""
        part = self._part
        self._mean *= np.float32(part.b1)
        self._mean += np.float32(1 - part.b1) * direction
        part.squares(self._squares, np.square(direction))
        scale = np.sqrt(self._squares)
        scale += np.float32(part.tau)
        model -= np.float32(part.lr) * self._mean / scale

    def state(self) -> dict[str, np.ndarray]:
        """Both."""
        return {"mean": self._mean, "squares": self._squares}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on with them."""
        self._mean, self._squares = state["mean"].copy(), state["squares"].copy()
