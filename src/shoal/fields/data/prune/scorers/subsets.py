"""Memorization and influence: what models know of an example that they have, or have not, seen.

Many small networks learn, each from a random share of the examples. An example is memorized as far
as those that saw it are right about it more often than the others; it influences another as far as
those that saw it are right about the other more often.

Source: Feldman, Zhang, What Neural Networks Memorize and Why: Discovering the Long Tail via
Influence Estimation, 2020, section 3; the largest influence and the sum of influences as scores of
pruning: Sorscher et al., 2022, section 4.

*Differs*: influence is counted on the other training examples. The paper counts it on test
examples, which a score must not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneExamples, Scores, ScoreWork
from shoal.fields.data.prune.scorers.networks import SmallNetworks, standardized, training_macs
from shoal.ir import Estimate, Machine

_BLOCK = 4_000_000
# Multiply-adds of one product of two long rows cost this share of those of a network.
_PRODUCT = 0.25

_Table = npt.NDArray[np.float32]


@part
class _OfSubsets:
    """What the three share: networks that learn from random shares of the examples."""

    needs_labels: ClassVar[bool] = True

    models: Annotated[int, Ge(4)] = 40
    share: Annotated[float, Gt(0), Lt(1)] = 0.7
    steps: Annotated[int, Ge(1)] = 300

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """With labels."""
        if work.classes > 1:
            yield self


@part
class Memorization(_OfSubsets):
    """How much more often networks are right about an example if they have learned from it.

    Args:
        models: networks.
        share: of the examples that each learns from.
        steps: of each, with 64 examples.
    """

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks' steps, and all examples once for each."""
        return _estimate(self, work)

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From -1 to 1."""
        return memorization(*_trained(self, examples, seed))


@part
class InfluenceMax(_OfSubsets):
    """The largest influence of an example on any other.

    Args:
        models: networks.
        share: of the examples that each learns from.
        steps: of each, with 64 examples.
    """

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks, and every example against every other."""
        return _estimate(self, work, pairs=True)

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From -1 to 1."""
        return influence(*_trained(self, examples, seed))[0]


@part
class InfluenceSum(_OfSubsets):
    """The sum of the sizes of an example's influences on all others.

    Args:
        models: networks.
        share: of the examples that each learns from.
        steps: of each, with 64 examples.
    """

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """The networks, and every example against every other."""
        return _estimate(self, work, pairs=True)

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """From 0 to the number of examples."""
        return influence(*_trained(self, examples, seed))[1]


def memorization(saw: _Table, right: _Table) -> Scores:
    """Float64 [n] from what each model saw and knew, both float32 [models, n] of 0 and 1."""
    unseen = 1 - saw
    known = (right * saw).sum(axis=0) / np.maximum(saw.sum(axis=0), 1)
    guessed = (right * unseen).sum(axis=0) / np.maximum(unseen.sum(axis=0), 1)
    return np.asarray(known - guessed, np.float64)


def influence(saw: _Table, right: _Table) -> tuple[Scores, Scores]:
    """Largest influence and sum of the sizes of all influences of each example, both float64 [n].

    Args:
        saw: float32 [models, n] of 0 and 1, what each model learned from.
        right: float32 [models, n] of 0 and 1, what each gets right.
    """
    n = saw.shape[1]
    largest, total = np.empty(n), np.empty(n)
    rows = max(1, _BLOCK // n)
    for first in range(0, n, rows):
        some = saw[:, first : first + rows]
        known = (some.T @ right) / np.maximum(some.sum(axis=0), 1)[:, None]
        guessed = ((1 - some).T @ right) / np.maximum((1 - some).sum(axis=0), 1)[:, None]
        of_pairs = known - guessed
        itself = np.arange(some.shape[1])
        of_pairs[itself, first + itself] = 0  # on itself it is memorization
        total[first : first + rows] = np.abs(of_pairs).sum(axis=1, dtype=np.float64)
        of_pairs[itself, first + itself] = -np.inf
        largest[first : first + rows] = of_pairs.max(axis=1)
    return largest, total


def _trained(scorer: Any, examples: PruneExamples, seed: int) -> tuple[_Table, _Table]:
    """What each model saw, and what it gets right."""
    X, y, n = standardized(examples.X), examples.labels, len(examples.X)
    draw = generator(seed, purpose="subsets")
    count = min(max(1, round(scorer.share * n)), n - 1)
    order = draw.permuted(np.broadcast_to(np.arange(n), (scorer.models, n)), axis=1)
    rows = order[:, :count]
    saw = np.zeros((scorer.models, n), np.float32)
    np.put_along_axis(saw, rows, 1.0, axis=1)
    networks = SmallNetworks(scorer.models, X.shape[1], examples.classes, seed=seed)
    networks.train(X, y, steps=scorer.steps, rows=rows)
    return saw, networks.right(X, y).astype(np.float32)


def _estimate(scorer: Any, work: ScoreWork, *, pairs: bool = False) -> Estimate:
    macs = training_macs(scorer.models, scorer.steps, work.rows, work.dim, work.classes)
    if pairs:
        macs += _PRODUCT * 2 * scorer.models * float(work.rows) ** 2
    held = 4.0 * work.rows * (work.dim + 4 * scorer.models)
    return score_estimate(work, macs=macs, held=held)
