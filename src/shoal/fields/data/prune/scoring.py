"""Scoring examples with any scorer: what is checked first, and an order that rows do not decide."""

from __future__ import annotations

import numpy as np

from shoal.fields.data.prune.protocols import (
    DataScorer,
    PruneError,
    PruneExamples,
    RowIds,
    Scores,
)

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def scored(scorer: DataScorer, examples: PruneExamples, seed: int) -> Scores:
    """Float64 [n]: the scores of examples in any order; they move with their rows.

    Raises:
        PruneError: there are no labels, one class, too few examples, or numbers that are not
            finite.
    """
    n = len(examples.X)
    if n < 2:
        raise PruneError(f"n_samples = {n}: expected two or more, some of which can be left out")
    if scorer.needs_labels and examples.y is None:
        raise PruneError(
            f"{type(scorer).__name__} needs classes; name their column with "
            "method.label, or choose a scorer without labels, such as ssl_prototypes"
        )
    if scorer.needs_labels and examples.classes < 2:
        raise PruneError(f"{type(scorer).__name__}: one class only; expected two or more")
    order = canonical_order(examples)
    result = np.empty(n)
    result[order] = scorer.scores(examples.take(order), seed)
    if not np.isfinite(result).all():
        raise PruneError(
            f"{type(scorer).__name__}: scores that are not finite; scale the vectors, whose "
            f"largest number is {np.abs(examples.X).max():.3g}"
        )
    return result


def canonical_order(examples: PruneExamples) -> RowIds:
    """Int64 [n]: the rows in the order of a hash of their contents.

    Rows that are equal keep the order they come in; whatever is computed of them is exchanged
    when they are.
    """
    words = np.ascontiguousarray(examples.X, np.float32).view(np.uint32)
    hashed = np.zeros(len(words), np.uint64)
    for column in range(words.shape[1]):
        hashed = _mixed(hashed ^ words[:, column])
    if examples.y is not None:
        hashed = _mixed(hashed ^ examples.y.astype(np.uint64))
    return np.argsort(hashed, kind="stable")


def _mixed(words: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        words = (words + np.uint64(1)) * _MULTIPLIER
    return np.asarray(words ^ (words >> np.uint64(29)))
