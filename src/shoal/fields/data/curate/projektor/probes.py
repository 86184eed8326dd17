"""Small models on mixtures of rows: how many of each source, which, and how well one does.

A probe is any function of rows to learn from and rows to be asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.fields.data.curate.projektor.surface import Floats
from shoal.fields.data.prune.protocols import PruneExamples, RowIds
from shoal.fields.data.prune.scorers.networks import standardized

Probe = Callable[[PruneExamples, PruneExamples], float]
"""(rows to learn from, rows to be asked about) -> share of the latter that is right."""


def drawn(
    sources: Sequence[PruneExamples], mixture_K: Floats, size: int, draw: np.random.Generator
) -> PruneExamples:
    """So many rows of a mixture, without repetition."""
    some = [
        source.take(draw.choice(len(source.X), count, replace=False))
        for source, count in zip(sources, counts_of(mixture_K, size), strict=True)
    ]
    X, y = np.concatenate([one.X for one in some]), np.concatenate([one.labels for one in some])
    return PruneExamples(X, y, sources[0].classes)


def counts_of(mixture_K: Floats, size: int) -> RowIds:
    """Int64 [K]: rows of each source, those with the largest remainders rounded up."""
    wanted_K = mixture_K * size
    counts_K = np.floor(wanted_K + 1e-9).astype(np.int64)
    rest = np.argsort(counts_K - wanted_K, kind="stable")[: size - int(counts_K.sum())]
    counts_K[rest] += 1
    return counts_K


def linear_probe(train: PruneExamples, test: PruneExamples) -> float:
    """Accuracy of logistic regression."""
    linear: Any = import_extra("sklearn.linear_model", extra="fields", purpose="a linear probe")
    if len(np.unique(train.labels)) == 1:
        return float((test.labels == train.labels[0]).mean())
    model = linear.LogisticRegression(C=0.1, max_iter=500)
    model.fit(standardized(train.X), train.labels)
    return float(model.score(standardized(test.X, train.X), test.labels))
