"""Which strategy each layer of a stage takes: a dynamic programme under a memory limit.

With ``C(l, E, s)`` the least time of the layers up to l that end in strategy s and fill at most
E units of memory::

    C(l, E, s) = min over s' of C(l - 1, E - O(l, s), s') + R(l, s', s) + c(l, s)

Time ``O(L E S^2)``, done as array arithmetic over E and s. Where R depends on the layouts of the
two strategies alone, the best of each layout is taken first: ``O(L E (S + G^2))`` for G layouts.

Source: Miao et al., Galvatron, 2023, section 3.3, equation 1; Wang et al., Improving Automatic
Parallel Training via Balanced Memory Workload Optimization, 2024, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import PlanError, require

_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


class StrategyChain(NamedTuple):
    """The best strategies of some layers.

    Args:
        seconds: what they cost, changes between layers included; infinite where none fits.
        choice: strategy of each layer; empty where none fits.
        units: memory that they fill; where none fits, the least that some legal choice fills,
            and -1 where no choice is legal.
    """

    seconds: float
    choice: tuple[int, ...]
    units: int


def cheapest_chain(
    seconds: _Floats,
    units: _Ints,
    change: _Floats,
    budget: int,
    group: Sequence[int] | None = None,
) -> StrategyChain:
    """The strategies of the least time among those whose memory is within the budget.

    Args:
        seconds: [L, S] time of each layer under each strategy; infinite where it is not legal.
        units: [L, S] memory, at least 0.
        change: [L - 1, G, G] time to go from the group of a layer's strategy to that of the next
            layer's; infinite where it cannot be done.
        budget: units that all layers together may fill.
        group: [S] group of each strategy, 0 to G - 1; each is its own if not given.

    Raises:
        PlanError: arrays that do not belong together, or a number that is negative.
    """
    own_group = np.arange(seconds.shape[-1]) if group is None else np.asarray(group)
    layers, count = _check(seconds, units, change, budget, own_group)
    best: _Floats = np.zeros((count, budget + 1))
    before: list[_Ints] = []
    for layer in range(layers):
        if layer:
            arrived, came = _arrive(best, change[layer - 1], own_group)
        else:
            arrived, came = best, np.zeros((count, budget + 1), dtype=np.int64)
        best = np.full((count, budget + 1), np.inf)
        for s in range(count):
            own = int(units[layer, s])
            if own <= budget and seconds[layer, s] < math.inf:
                best[s, own:] = arrived[s, : budget + 1 - own] + seconds[layer, s]
        before.append(came)
    last = int(best[:, budget].argmin())
    result = float(best[last, budget])
    if result == math.inf:
        return StrategyChain(math.inf, (), _least(seconds, units, change, own_group))
    choice, left = [last], budget
    for layer in range(layers - 1, 0, -1):
        left -= int(units[layer, choice[-1]])
        choice.append(int(before[layer][choice[-1], left]))
    choice.reverse()
    filled = int(units[np.arange(layers), choice].sum())
    return StrategyChain(result, tuple(choice), filled)


def _arrive(best: _Floats, change: _Floats, group: _Ints) -> tuple[_Floats, _Ints]:
    """[S, E]: least time before a layer by its strategy, and the strategy before."""
    count = len(change)
    columns = np.arange(best.shape[1])
    least = np.empty((count, best.shape[1]))
    who = np.empty(least.shape, dtype=np.int64)
    for g in range(count):
        members = np.flatnonzero(group == g)
        at = best[members].argmin(axis=0)
        who[g] = members[at]
        least[g] = best[who[g], columns]
    arrived = np.empty_like(least)
    came = np.empty_like(who)
    for g in range(count):
        total = least + change[:, g, None]
        source = total.argmin(axis=0)
        arrived[g] = total[source, columns]
        came[g] = who[source, columns]
    return arrived[group], came[group]


def _least(seconds: _Floats, units: _Ints, change: _Floats, group: _Ints) -> int:
    """The least memory of a legal choice; -1 if there is none."""
    cost = np.where(np.isfinite(seconds), units, np.inf)
    best: _Floats = cost[0]
    for layer in range(1, len(cost)):
        legal = np.where(np.isfinite(change[layer - 1]), 0.0, np.inf)[np.ix_(group, group)]
        best = (best[:, None] + legal).min(axis=0) + cost[layer]
    least = float(best.min())
    return int(least) if least < math.inf else -1


def _check(
    seconds: _Floats, units: _Ints, change: _Floats, budget: int, group: _Ints
) -> tuple[int, int]:
    layers, count = seconds.shape if seconds.ndim == 2 else (0, 0)
    require(
        layers >= 1 and count >= 1,
        "seconds",
        list(seconds.shape),
        expected="[layers, strategies], at least one of each",
        error=PlanError,
    )
    groups = int(group.max()) + 1 if len(group) == count else 0
    require(
        units.shape == (layers, count) and change.shape == (layers - 1, groups, groups),
        "units and change",
        (list(units.shape), list(change.shape)),
        expected=f"{[layers, count]} and {[layers - 1, groups, groups]}",
        error=PlanError,
    )
    require(
        bool(groups) and set(group.tolist()) == set(range(groups)),
        "group",
        group.tolist(),
        expected=f"a group for each of {count} strategies, numbered from 0",
        error=PlanError,
    )
    require(budget >= 0, "budget", budget, expected="at least 0 units", error=PlanError)
    require(
        not np.isnan(seconds).any() and not np.isnan(change).any(),
        "seconds and change",
        "nan",
        expected="numbers; infinity where something is not legal",
        error=PlanError,
    )
    require(
        bool((units >= 0).all()),
        "units",
        int(units.min()),
        expected="at least 0 everywhere",
        error=PlanError,
    )
    return layers, count
