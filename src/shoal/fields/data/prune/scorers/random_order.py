"""Random order: what every other score has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.prune.costs import score_estimate
from shoal.fields.data.prune.protocols import PruneExamples, Scores, ScoreWork
from shoal.ir import Estimate, Machine


@part
class RandomOrder:
    """A random number for each example, from its contents and the seed."""

    needs_labels: ClassVar[bool] = False

    def estimate(self, work: ScoreWork, machine: Machine) -> Estimate:
        """Next to nothing."""
        return score_estimate(work)

    def candidates(self, work: ScoreWork, machine: Machine) -> Iterator[Self]:
        """Never: the method ``random`` needs no score for it, and streams."""
        yield from ()

    def scores(self, examples: PruneExamples, seed: int) -> Scores:
        """Uniform on [0, 1)."""
        return generator(seed, purpose="random scores").random(len(examples.X))
