"""The best route of every token through layers that are big, small or skipped.

A pattern is one route for every layer. A caller's function computes the losses of some
patterns; what comes back is the best pattern token by token. All patterns of few layers are asked
for; of many, coordinate descent or a beam over layers asks for few of them.

Shapes: K patterns, L layers, N tokens.

Source: Alizadeh et al., Duo-LLM, 2024.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.core.errors import PlanError, require

BIG, SMALL, SKIP = 0, 1, 2
_MOST = 3**8

Losses = Callable[[np.ndarray], np.ndarray]
"""Patterns int64 [K, N, L], one for each token, to losses [K, N]."""


def patterns(num_layers: int, *, big: int | None = None) -> np.ndarray:
    """All patterns int64 [K, L]; only those with at most ``big`` big layers if it is given.

    Raises:
        PlanError: a budget beyond the layers, or more patterns than can be tried.
    """
    _check(num_layers, big)
    require(
        3**num_layers <= _MOST,
        "search",
        f"exhaustive over {3**num_layers} patterns",
        expected=f"at most {_MOST} of them",
        hint="use search: beam or descent",
        error=PlanError,
    )
    every = np.array(list(itertools.product((BIG, SMALL, SKIP), repeat=num_layers)))
    return every if big is None else every[(every == BIG).sum(1) <= big]


def _check(num_layers: int, big: int | None) -> None:
    require(num_layers >= 1, "layers", num_layers, expected="at least 1", error=PlanError)
    require(
        big is None or 0 <= big <= num_layers,
        "budget",
        big,
        expected=f"0 to {num_layers} big layers",
        error=PlanError,
    )


@dataclass(frozen=True)
class OracleResult:
    """What a search has found.

    Args:
        routes: int64 [N, L].
        losses: [N], of these routes.
        evaluations: patterns that were evaluated, of each token.
    """

    routes: np.ndarray
    losses: np.ndarray
    evaluations: int


def best(losses_KN: np.ndarray, patterns_KL: np.ndarray) -> OracleResult:
    """The best of these patterns for each token; the first of equals."""
    chosen = losses_KN.argmin(0)
    return OracleResult(
        patterns_KL[chosen], losses_KN[chosen, np.arange(losses_KN.shape[1])], len(patterns_KL)
    )


def difficulty(all_small_N: np.ndarray, oracle_N: np.ndarray) -> np.ndarray:
    """What more computation can buy of each token's loss; of a hopeless token it is little."""
    gain: np.ndarray = all_small_N - oracle_N
    return gain


def search(
    losses: Losses,
    num_layers: int,
    num_tokens: int,
    *,
    big: int | None = None,
    method: Literal["exhaustive", "beam", "descent"] = "exhaustive",
    width: int = 4,
) -> OracleResult:
    """The best routes of every token.

    Args:
        losses: says how good patterns are.
        num_layers: L.
        num_tokens: N.
        big: most big layers of a token; any number, if not given.
        method: all patterns; a beam that decides layer after layer, the rest small; or layer by
            layer until no layer gets better.
        width: patterns of a token that a beam keeps.

    Raises:
        PlanError: a budget beyond the layers, or too many patterns for ``exhaustive``.
    """
    _check(num_layers, big)
    require(width >= 1, "width", width, expected="at least 1", error=PlanError)
    if method == "exhaustive":
        every = patterns(num_layers, big=big)
        spread = np.broadcast_to(every[:, None], (len(every), num_tokens, num_layers))
        return best(losses(spread), every)
    start = np.full((1, num_tokens, num_layers), SMALL)
    kept, values = start, losses(start)
    value = 1
    sweeps = 1 if method == "beam" else num_layers
    for _ in range(sweeps):
        before = values.min(0)
        for layer in range(num_layers):
            tried = np.concatenate([_with(kept, layer, route) for route in (BIG, SMALL, SKIP)])
            result = losses(tried)
            value += len(tried)
            if big is not None:
                result = np.where((tried == BIG).sum(-1) <= big, result, np.inf)
            order = np.argsort(result, axis=0, kind="stable")[: 1 if method == "descent" else width]
            kept = np.take_along_axis(tried, order[..., None], 0)
            values = np.take_along_axis(result, order, 0)
        if np.array_equal(values.min(0), before):
            break
    return OracleResult(kept[0], values[0], value)


def _with(kept_KNL: np.ndarray, layer: int, route: int) -> np.ndarray:
    changed = kept_KNL.copy()
    changed[:, :, layer] = route
    return changed
