"""What scores examples by difficulty, what chooses among them, and what both are given.

A scorer sees the training examples alone, never those that a model is tested on, and gives each a
number that is higher the harder it is. Rows come in an order that follows from their contents, so
that a score does not depend on where in a file its row stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from shoal.core.config import Value
from shoal.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from shoal.ir import Estimate, Machine

Scores: TypeAlias = npt.NDArray[np.float64]
RowIds: TypeAlias = npt.NDArray[np.int64]


class PruneError(DataError, ConfigError, ValueError):
    """Examples that cannot be scored, or a choice among them that cannot be made."""


@dataclass(frozen=True)
class PruneExamples:
    """Examples to score.

    Args:
        X: float32 [n, d] vectors.
        y: int64 [n] classes, numbered from 0; None where there are no labels.
        classes: how many classes there are; 0 without labels.
    """

    X: npt.NDArray[np.float32]
    y: RowIds | None = None
    classes: int = 0

    @property
    def labels(self) -> RowIds:
        """The classes of a scorer that cannot do without."""
        assert self.y is not None
        return self.y

    def take(self, rows: RowIds) -> PruneExamples:
        """Some of them, in that order."""
        return PruneExamples(self.X[rows], None if self.y is None else self.y[rows], self.classes)


class PruneRates(Value):
    """How fast a machine does what scorers do, each with one thread.

    Args:
        mac_s: seconds of one multiply-add of small networks that are trained together.
        distance_s: seconds of one number of one vector held against one centroid.
        ngram_s: seconds of one byte of text that is hashed.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or derived from its description.
    """

    mac_s: float
    distance_s: float
    ngram_s: float
    spread: float
    measured: bool


class ScoreWork(Value):
    """What is scored, as the scorers' estimates see it.

    Args:
        rows: examples.
        dim: numbers of a vector.
        classes: of the labels; 0 without labels.
    """

    rows: int
    dim: int
    classes: int
    rates: PruneRates


@runtime_checkable
class DataScorer(Protocol):
    """A part of kind ``data_scorer``: how hard is an example?"""

    needs_labels: ClassVar[bool]
    """Whether it cannot be used without classes."""

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """Seconds of scoring, and bytes of memory by cause."""

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """Float64 [n], higher is harder.

        Args:
            examples: in an order that follows from their contents.
            seed: of everything random.

        Raises:
            PruneError: there are too few of them.
        """


@runtime_checkable
class DataSelector(Protocol):
    """A part of kind ``data_selector``: which of the scored examples are kept?"""

    def select(
        self, scores: Scores, budget: int, *, groups: RowIds | None = None, dim: int = 1
    ) -> RowIds:
        """Sorted int64 [budget], the rows that are kept.

        Args:
            scores: float64 [n], higher is harder.
            budget: how many are kept, 1 to n.
            groups: int64 [n] classes; None without labels.
            dim: numbers of a vector, for the theory's advice.

        Raises:
            PruneError: the classes do not allow it.
        """
