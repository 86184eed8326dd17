"""Uncertainty of trained networks: small margins, high entropy, members that disagree.

Source: Coleman et al., Selection via Proxy: Efficient Data Selection for Deep Learning, 2020
(margin and entropy of small models); Chitta et al., Training Data Subset Search with Ensemble
Active Learning, 2022 (disagreement), as the mutual information of label and member: Houlsby et al.,
Bayesian Active Learning for Classification and Preference Learning, 2011.

*Differs*: the networks have seen the labels of the examples that they are asked about, for few
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneExamples, Scores, ScoreWork
from shoal.fields.data.prune.scorers.networks import SmallNetworks, standardized, training_macs
from shoal.ir import Estimate, Machine


@part
class _OfEnsemble:
    """What the three share: networks that are asked about all examples."""

    needs_labels: ClassVar[bool] = True

    models: Annotated[int, Ge(1)] = 5
    steps: Annotated[int, Ge(1)] = 200

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks' steps, and all examples once."""
        macs = training_macs(self.models, self.steps, work.rows, work.dim, work.classes)
        return score_estimate(work, macs=macs, held=4.0 * work.rows * work.dim)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With labels."""
        if work.classes > 1:
            yield self


@part
class SmallestMargin(_OfEnsemble):
    """Minus the gap between the two most probable classes.

    Args:
        models: networks, whose mean prediction counts.
        steps: of each, with 64 examples.
    """

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From -1 to 0."""

        def margin(chances: Any) -> Any:
            two = np.partition(chances.mean(axis=0), -2, axis=1)[:, -2:]
            return two[:, 0] - two[:, 1]

        return _asked(self, examples, seed, margin)


@part
class PredictionEntropy(_OfEnsemble):
    """Entropy of the predicted classes.

    Args:
        models: networks, whose mean prediction counts.
        steps: of each, with 64 examples.
    """

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """In nats, from 0 to the logarithm of the classes."""
        return _asked(self, examples, seed, lambda chances: _entropy(chances.mean(axis=0)))


@part
class EnsembleDisagreement(_OfEnsemble):
    """How much the members of an ensemble contradict each other.

    Args:
        models: networks.
        steps: of each, with 64 examples.
    """

    models: Annotated[int, Ge(2)] = 10

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """Entropy of the mean prediction less the mean entropy, in nats, from 0."""

        def disagreement(chances: Any) -> Any:
            together = _entropy(chances.mean(axis=0))
            return np.maximum(together - _entropy(chances).mean(axis=0), 0.0)

        return _asked(self, examples, seed, disagreement)


def _asked(scorer: Any, examples: PruneExamples, seed: int, score: Any) -> Scores:
    """Scores from the probabilities [models, rows, classes] of a trained ensemble."""
    X, result = standardized(examples.X), np.empty(len(examples.X))
    networks = SmallNetworks(scorer.models, X.shape[1], examples.classes, seed=seed)
    networks.train(X, examples.labels, steps=scorer.steps)
    for where, chances in networks.probabilities(X):
        result[where] = score(chances.astype(np.float64))
    return result


def _entropy(chances: Any) -> Any:
    return -(chances * np.log(np.maximum(chances, 1e-30))).sum(axis=-1)
