"""EL2N: the error of a network that has hardly begun to learn.

Source: Paul, Ganguli, Dziugaite, Deep Learning on a Data Diet: Finding Important Examples Early in
Training, 2021, definition 2.2: the length of p - onehot(y) early in training, over several models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneExamples, Scores, ScoreWork
from shoal.fields.data.prune.scorers.networks import SmallNetworks, standardized, training_macs
from shoal.ir import Estimate, Machine


@part
class EL2N:
    """Length of the error vector early in training, the mean of several small networks.

    Args:
        models: networks.
        steps: of each, with 64 examples; few, because late in training most errors are 0.
    """

    needs_labels: ClassVar[bool] = True

    models: Annotated[int, Ge(1)] = 10
    steps: Annotated[int, Ge(1)] = 100

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks' steps, and all examples once."""
        macs = training_macs(self.models, self.steps, work.rows, work.dim, work.classes)
        return score_estimate(work, macs=macs, held=4.0 * work.rows * work.dim)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With labels."""
        if work.classes > 1:
            yield self

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From 0 to the root of 2."""
        X, y = standardized(examples.X), examples.labels
        networks = SmallNetworks(self.models, X.shape[1], examples.classes, seed=seed)
        networks.train(X, y, steps=self.steps)
        result = np.empty(len(X))
        for where, chances in networks.probabilities(X):
            chances[:, np.arange(chances.shape[1]), y[where]] -= 1
            result[where] = np.sqrt((chances**2).sum(axis=2)).mean(axis=0)
        return result
