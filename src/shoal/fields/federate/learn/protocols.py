"""What clients learn from, who has it, and the models that they train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from shoal.fields.federate.protocols import LocalJob


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """A data set in memory.

    Args:
        x: float32 [N, ...] or int64 [N, T].
        y: labels, int64 [N] or [N, T].
        classes: number of labels.
        owner: the natural owner of each example, int64 [N]; empty if there is none.
    """

    x: np.ndarray
    y: np.ndarray
    classes: int
    owner: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, rows: np.ndarray) -> Examples:
        """Some of the examples."""
        owner = self.owner[rows] if len(self.owner) else self.owner
        return Examples(x=self.x[rows], y=self.y[rows], classes=self.classes, owner=owner)


@runtime_checkable
class ExampleSource(Protocol):
    """A data set that clients share."""

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """What clients have together, and what the server tests on.

        Raises:
            DataError: it cannot be read.
        """


@runtime_checkable
class Partitioner(Protocol):
    """Which client has which examples."""

    def split(self, examples: Examples, clients: int, seed: int) -> list[np.ndarray]:
        """Row numbers of each client; every example has one owner.

        Raises:
            FederationError: a client would have none.
        """


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """How clients learn.

    Args:
        lr: learning rate of SGD.
        momentum: of SGD.
        batch: examples of a step.
        prox: weight of the distance from the received model in the loss (FedProx).
        seed: of the order of examples.
    """

    lr: float
    momentum: float
    batch: int
    prox: float
    seed: int


class Learning(Protocol):
    """A model that learns, in one process; it has no state between calls.

    Attributes:
        layout: name and shape of each tensor in the vector, in their order.
    """

    layout: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def size(self) -> int:
        """Parameters and buffers, P."""

    def start(self, seed: int) -> np.ndarray:
        """A model to begin with, float32 [P]."""

    def fit(
        self, model: np.ndarray, examples: Examples, job: LocalJob, settings: LocalSettings
    ) -> tuple[np.ndarray, float]:
        """The model [P] after the steps of a job, and the mean loss; the same for the same job."""

    def evaluate(self, model: np.ndarray, examples: Examples) -> dict[str, float]:
        """``loss`` and ``accuracy``."""


@runtime_checkable
class Learner(Protocol):
    """An architecture that clients train."""

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Parameters, and FLOPs of forward and backward for one example; imports no torch."""

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """Make it for examples of a shape.

        Raises:
            MissingExtraError: it needs what is not installed.
        """
