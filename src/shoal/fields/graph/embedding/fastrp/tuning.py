"""Choosing weights and exponent of FastRP by a few labels.

The embedding is linear in the weights: for each exponent the powers are computed once, only rows
with a label are kept, and other weights mix these again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.fields.graph.embedding.fastrp.model import FastRPModel
from shoal.fields.graph.embedding.judging import left_out_f1
from shoal.fields.graph.graph import CSRGraph, NodeLabels

# Exponents that are tried first; then those around the best, half as far apart each time.
_BETAS = tuple(step / 4 for step in range(-4, 5))
_FINEST = 1 / 16
_FACTOR = 4.0


def tuned(
    graph: CSRGraph,
    labels: NodeLabels,
    *,
    weights: tuple[float, ...],
    beta: float | None,
    free: bool,
    trials: int,
    **options: Any,
) -> tuple[tuple[float, ...], float, list[dict[str, Any]]]:
    """The weights and the exponent with the best Micro-F1, each node judged without its own label.

    Args:
        graph: that is embedded.
        labels: of the nodes that may be looked at; others have none.
        weights: to begin with.
        beta: exponent; None if it is to be chosen too.
        free: weights may change.
        trials: at most, at least 1.
        options: of :class:`FastRPModel`.

    Returns:
        Weights, exponent, and all that was tried with its score.
    """
    rows = labels.labelled
    known = labels.take(rows)
    tried: list[dict[str, Any]] = []
    powers: dict[float, np.ndarray] = {}

    def score(weights: tuple[float, ...], beta: float) -> float:
        if beta not in powers:
            powers[beta] = FastRPModel(graph, beta=beta, weights=weights, **options).sample(rows)
        mixed = np.tensordot(np.asarray(weights, np.float32), powers[beta], axes=1)
        f1 = left_out_f1(mixed, known)
        tried.append({"weights": list(weights), "beta": beta, "micro_f1": f1})
        return f1

    best = (-1.0, weights, 0.0 if beta is None else beta)
    budget = trials if not free else max(1, trials // 2) if beta is None else 0
    if beta is None:
        waiting, step = list(_BETAS), 0.125
        while waiting and len(tried) < budget:
            one = waiting.pop(0)
            best = max(best, (score(weights, one), weights, one), key=lambda item: item[0])
            if not waiting and step >= _FINEST:
                waiting = [near for near in (best[2] - step, best[2] + step) if abs(near) <= 1]
                step /= 2
    at, unchanged = 0, 0
    if free and not tried:
        best = (score(weights, best[2]), weights, best[2])
    while free and len(tried) < trials and unchanged < 2 * len(weights):
        place, up = len(weights) - 1 - at // 2 % len(weights), at % 2 == 0
        at += 1
        other = _moved(best[1], place, up)
        seen = any(one["weights"] == list(other) and one["beta"] == best[2] for one in tried)
        f1 = -1.0 if seen or not any(other) else score(other, best[2])
        unchanged = 0 if f1 > best[0] else unchanged + 1
        best = max(best, (f1, other, best[2]), key=lambda item: item[0])
    return best[1], best[2], tried


def _moved(weights: tuple[float, ...], place: int, up: bool) -> tuple[float, ...]:
    """One weight a step up or down the grid; from 0 up to a sixteenth of the largest."""
    result = list(weights)
    if up:
        result[place] = result[place] * _FACTOR or max(weights) / _FACTOR**2
    else:
        result[place] = (
            0.0 if result[place] <= max(weights) / _FACTOR**2 else result[place] / _FACTOR
        )
    return tuple(result)
