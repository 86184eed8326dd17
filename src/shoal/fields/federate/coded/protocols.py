"""Gradient coding: what schemes promise the server that drives them. Numpy only.

Time passes in rounds 1, 2, ... Job t is one full-batch gradient; it starts in round t and must be
decoded by the end of round t + T. In each round a worker gets mini-tasks, each the weighted sum of
the gradients of some chunks of the data, and delivers all of them or none: then it is a straggler
of that round. A scheme decides on tasks and decodes; it never sees a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np

from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import FederationError
from shoal.ir import Machine


class CodedError(FederationError):
    """A scheme does not fit the workers or the models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniTask:
    """A weighted sum of gradients.

    Args:
        job: of which model and step.
        parts: number of a chunk and its weight, pair by pair.
    """

    job: int
    parts: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """A mini-task whose result is there, and its weight in a gradient.

    Args:
        round: in which it was delivered.
        worker: by which; it has at most one mini-task of a job in a round.
        weight: of its result.
    """

    round: int
    worker: int
    weight: float


class Coding(Protocol):
    """A scheme at work; it is driven round by round.

    Attributes:
        load: fraction of the data that a worker processes in a round.
        delay: T, rounds that a gradient may be late.
        chunks: fraction of the data of each chunk; they add up to 1.
    """

    load: float
    delay: int
    chunks: tuple[float, ...]

    def tasks(self, number: int, worker: int) -> tuple[MiniTask, ...]:
        """Mini-tasks of a worker in a round, when all rounds before are closed."""

    def enough(self, arrived: Set[int]) -> bool:
        """Whether waiting for more workers in this round would be of no use."""

    def recoverable(self, number: int, arrived: Set[int]) -> bool:
        """Whether every job can still be decoded in time if a round is closed now.

        It holds for every straggler pattern of the scheme's model; if all workers have arrived; and
        where it holds, some way to go on keeps it.
        """

    def close(self, number: int, arrived: Set[int]) -> None:
        """End a round; the other workers were stragglers."""

    def decode(self, job: int) -> tuple[Delivered, ...] | None:
        """The results whose weighted sum is the gradient of the whole data; None if too few."""


@dataclass(frozen=True, kw_only=True)
class CodedWork:
    """What the picker knows.

    Args:
        workers: n.
        models: M, that are trained in turn.
        most: stragglers beyond which schemes are not tried.
    """

    workers: int
    models: int
    most: int


@runtime_checkable
class CodedScheme(Protocol):
    """How gradients are divided over workers and rounds."""

    @classmethod
    def candidates(cls, work: CodedWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here."""

    def start(self, workers: int, jobs: int) -> Coding:
        """Begin.

        Raises:
            CodedError: its options do not fit so many workers.
        """


@runtime_checkable
class GradientLearning(Protocol):
    """A model that says its gradient, beside what ``Learning`` does."""

    def gradient(self, model: np.ndarray, examples: Examples) -> tuple[np.ndarray, float]:
        """Mean gradient float32 [P] of the loss at a model float32 [P], and the mean loss."""


def rounds_of(coding: Coding, jobs: int) -> range:
    """Numbers of all rounds."""
    return range(1, jobs + coding.delay + 1)


def check_models(models: int, delay: int) -> None:
    """Compare the number of models with the delay of a scheme.

    Raises:
        CodedError: a model's next job would start before the one before is decoded.
    """
    if models <= delay:
        raise CodedError(
            f"models = {models}: gradients come up to {delay} rounds late, so at least {delay + 1} "
            "models must be trained in turn"
        )


def shares(count: int, size: float = 1.0) -> tuple[float, ...]:
    """Equal chunks of a part of the data."""
    return (size / count,) * count
