"""Forgetting: how often an example that was right becomes wrong while a network learns.

Source: Toneva et al., An Empirical Study of Example Forgetting during Deep Neural Network
Learning, 2019, algorithm 1: examples are asked when they are in a batch; those that are never right
count as forgotten more often than any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneExamples, Scores, ScoreWork
from shoal.fields.data.prune.scorers.networks import (
    BATCH,
    SmallNetworks,
    standardized,
    training_macs,
)
from shoal.ir import Estimate, Machine


@part
class Forgetting:
    """Times that training forgets an example, the mean of several small networks.

    Args:
        models: networks.
        passes: over all examples, so that each is asked so often.
    """

    needs_labels: ClassVar[bool] = True

    models: Annotated[int, Ge(1)] = 5
    passes: Annotated[int, Ge(2)] = 20

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks' steps."""
        steps = self._steps(work.rows)
        macs = training_macs(self.models, steps, 0, work.dim, work.classes)
        held = 4.0 * work.rows * (work.dim + 3 * self.models)
        return score_estimate(work, macs=macs, held=held)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With labels."""
        if work.classes > 1:
            yield self

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From 0 to ``passes + 1``, of what is never right."""
        X, y = standardized(examples.X), examples.labels
        count = ForgettingCount(self.models, len(X))
        networks = SmallNetworks(self.models, X.shape[1], examples.classes, seed=seed)
        networks.train(X, y, steps=self._steps(len(X)), seen=count)
        return count.mean(never=self.passes + 1)

    def _steps(self, rows: int) -> int:
        return max(1, self.passes * rows // min(BATCH, rows))


class ForgettingCount:
    """Counts, for each model and example, how often right is followed by wrong.

    Args:
        models: how many.
        rows: examples.
    """

    def __init__(self, models: int, rows: int) -> None:
        self._right = np.zeros((models, rows), bool)
        self._learned = np.zeros((models, rows), bool)
        self._forgotten = np.zeros((models, rows), np.int32)

    def __call__(self, chosen: Any, right: Any) -> None:
        """A batch of each model, and which of its examples were right."""
        model = np.arange(len(chosen))[:, None]
        self._forgotten[model, chosen] += self._right[model, chosen] & ~right
        self._right[model, chosen] = right
        self._learned[model, chosen] |= right

    def mean(self, never: int) -> Scores:
        """Float64 [rows], the mean over models.

        Args:
            never: what an example counts for in a model that has never been right about it.
        """
        counted = np.where(self._learned, self._forgotten, never)
        return np.asarray(counted.mean(axis=0), np.float64)
