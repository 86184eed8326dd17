"""Fitting the law of repeated data to curves, and choosing pools by it.

Source: Goyal et al., Scaling Laws for Data Filtering: Data Curation cannot be Compute Agnostic,
2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal.core.random import seed64
from shoal.cost.scaling.repetition import PoolChoice, PoolCurve, RepetitionLaw, fit_pools
from shoal.fields.data.prune.protocols import PruneExamples, RowIds
from shoal.fields.data.prune.scorers.networks import BATCH, HIDDEN, SmallNetworks, standardized


class QQT:
    """Choose the pools of data that are best for a budget of samples.

    Args:
        seed: of the intervals.

    Attributes:
        law_: the fitted :class:`~shoal.cost.scaling.repetition.RepetitionLaw`.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, curves: Sequence[PoolCurve]) -> Self:
        """Fit the law to curves of single pools; no union is trained for it.

        Args:
            curves: one for each pool, the best first, all of pools of one size.

        Raises:
            ConfigError: the curves do not say what the law needs.
        """
        self.law_: RepetitionLaw = fit_pools(curves, seed=self.seed)
        return self

    def choose(self, budget: float) -> PoolChoice:
        """The best union of pools.

        Args:
            budget: samples that a model is trained on, repetitions counted.
        """
        return self.law_.choose(budget)


def probe(
    pool: PruneExamples,
    test: PruneExamples,
    samples: Sequence[int],
    *,
    models: int = 4,
    hidden: int = HIDDEN,
    seed: int = 0,
) -> npt.NDArray[np.float64]:
    """Float64 [points]: loss of small networks after so many samples of a pool, in nats.

    Args:
        pool: what they learn from, over and over.
        test: what they are asked.
        samples: increasing numbers of samples seen.
        models: networks whose mean loss counts.
        hidden: units of each.
        seed: of the networks.
    """
    X, held = standardized(pool.X), standardized(test.X, pool.X)
    seed = seed64(seed, purpose="pool probe")
    networks = SmallNetworks(models, X.shape[1], pool.classes, hidden=hidden, seed=seed)
    steps = [max(1, round(wanted / min(BATCH, len(X)))) for wanted in samples]
    losses: dict[int, float] = {}

    def seen(chosen: RowIds, right: Any) -> None:
        if networks.steps in steps:
            losses[networks.steps] = _loss(networks, held, test.labels)

    networks.train(X, pool.labels, steps=steps[-1], seen=seen)
    return np.array([losses[step] for step in steps])


def _loss(networks: SmallNetworks, X: npt.NDArray[np.float32], y: RowIds) -> float:
    """Mean cross entropy over examples and networks."""
    total = 0.0
    for where, chances in networks.probabilities(X):
        right = chances[:, np.arange(chances.shape[1]), y[where]]
        total -= float(np.log(np.maximum(right, 1e-30)).sum(dtype=np.float64))
    return total / (networks.models * len(X))
