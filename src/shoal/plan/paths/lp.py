"""Paths on unequal fabrics: the least worst link by linear programming, then whole pieces.

The programme deals the bytes between each pair of leaves to spines so that the busiest link,
relative to what it can carry, is as little busy as it can be. Its shares are rounded to pieces,
and pieces are moved off the busiest link as long as that helps.

Source: Raghavan and Thompson, Randomized Rounding, 1987 (the relaxation); Huangfu and Hall,
Parallelizing the Dual Revised Simplex Method, 2018 (HiGHS).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from scipy.optimize import linprog
from scipy.sparse import coo_array, csr_array

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.network.fabric import LeafSpine
from shoal.cost.network.flows import FlowPaths, Flows
from shoal.plan.paths.common import pieces_of
from shoal.plan.paths.greedy import least_loaded

_MOST_VARIABLES = 200_000


@part
class MinMaxLP:
    """Minimize the maximum link load by linear programming, for fabrics with degraded links.

    Args:
        pieces: number of equal pieces of each flow (of each port), each with its own path.
    """

    pieces: Annotated[int, Ge(1), Le(1024)] = 4

    def paths(self, flows: Flows, fabric: LeafSpine, *, seed: int = 0) -> FlowPaths:
        """Solve and round phase by phase; phases with the same demand are solved once.

        Raises:
            PlanError: two leaves have no spine in common, or the programme is too large.
        """
        return rounded(flows, fabric, self.pieces, "lp")


def rounded(
    flows: Flows, fabric: LeafSpine, pieces: int, planner: str, notes: tuple[str, ...] = ()
) -> FlowPaths:
    """Paths by the programme, in whole pieces."""
    cut = pieces_of(flows, fabric)
    rows = np.flatnonzero(cut.crossing)
    phase = cut.phase[rows]
    solved: dict[bytes, np.ndarray] = {}
    chosen, spine = [], []
    borders = np.flatnonzero(np.diff(phase, prepend=-1))
    for begin, end in zip(borders, [*borders[1:], len(phase)], strict=True):
        own = np.repeat(rows[begin:end], pieces)
        size = flows.size[cut.flow[own]] * cut.share / pieces
        first, last = cut.first[own], cut.last[own]
        bytes_LL = np.zeros((fabric.leaves, fabric.leaves))
        np.add.at(bytes_LL, (first, last), size)
        key = bytes_LL.tobytes()
        if key not in solved:
            solved[key] = least_worst(bytes_LL, fabric)[1]
        chosen.append(own)
        spine.append(_round(first, last, size, solved[key], fabric))
    taken = np.concatenate(chosen) if chosen else np.zeros(0, np.int64)
    spines = np.concatenate(spine) if spine else np.zeros(0, np.int64)
    return cut.paths(taken, 1.0 / pieces, spines, planner=planner, notes=notes)


def least_worst(bytes_LL: np.ndarray, fabric: LeafSpine) -> tuple[float, np.ndarray]:
    """Seconds of the busiest link at its best, and the bytes of each pair on each spine.

    Returns:
        Seconds, and bytes [L, L, S].

    Raises:
        PlanError: two leaves have no spine in common, or there are too many variables.
    """
    L, n = fabric.leaves, fabric.spines
    rate = fabric.uplinks
    a, b = np.nonzero(bytes_LL)
    pair, spine = np.nonzero((rate[a] > 0) & (rate[b] > 0))
    out = np.zeros((L, L, n))
    if not len(a):
        return 0.0, out
    cut_off = np.setdiff1d(np.arange(len(a)), pair)
    if len(cut_off):
        raise PlanError(
            f"leaf {a[cut_off[0]]} and leaf {b[cut_off[0]]}: no spine has links to both that are "
            "up; repair one, or keep a job on one side"
        )
    require(
        len(pair) <= _MOST_VARIABLES,
        "pairs of leaves x spines",
        len(pair),
        expected=f"at most {_MOST_VARIABLES} for the linear programme",
        hint="split and c4p need none",
        error=PlanError,
    )
    # Bytes and rates in units of their largest, so that numbers are near one.
    bytes_1, rate_1 = float(bytes_LL.max()), float(rate.max())
    count = len(pair)
    variable = np.arange(count)
    ups, up_row = np.unique(a[pair] * n + spine, return_inverse=True)
    downs, down_row = np.unique(b[pair] * n + spine, return_inverse=True)
    limit = np.concatenate([rate.ravel()[ups], rate.ravel()[downs]]) / rate_1
    rows = len(limit)
    bounded = csr_array(
        coo_array(
            (
                np.concatenate([np.ones(2 * count), -limit]),
                (
                    np.concatenate([up_row, down_row + len(ups), np.arange(rows)]),
                    np.concatenate([variable, variable, np.full(rows, count)]),
                ),
            ),
            shape=(rows, count + 1),
        )
    )
    whole = csr_array(coo_array((np.ones(count), (pair, variable)), shape=(len(a), count + 1)))
    cost = np.zeros(count + 1)
    cost[count] = 1.0
    result = linprog(  # type: ignore[call-overload]
        cost,
        A_ub=bounded,
        b_ub=np.zeros(rows),
        A_eq=whole,
        b_eq=bytes_LL[a, b] / bytes_1,
        method="highs",
    )
    if result.x is None:
        raise PlanError(f"the linear programme of paths was not solved: {result.message}")
    out[a[pair], b[pair], spine] = np.maximum(result.x[:count], 0.0) * bytes_1
    return float(result.x[count]) * bytes_1 / rate_1, out


def _round(
    first: np.ndarray,
    last: np.ndarray,
    size: np.ndarray,
    share_LLS: np.ndarray,
    fabric: LeafSpine,
) -> np.ndarray:
    """Spine of every piece: quotas first, then the least busy, then moves off the worst link."""
    quota = share_LLS.copy()
    spine = np.full(len(first), -1)
    for row in np.argsort(-size, kind="stable").tolist():
        room = quota[first[row], last[row]]
        best = int(room.argmax())
        if room[best] >= size[row] * (1 - 1e-6):
            room[best] -= size[row]
            spine[row] = best
    rate = fabric.uplinks
    safe = np.where(rate > 0, rate, 1.0)
    up, down = np.zeros_like(rate), np.zeros_like(rate)
    placed = spine >= 0
    for load, leaf in ((up, first), (down, last)):
        np.add.at(load, (leaf[placed], spine[placed]), size[placed])
        load /= safe
    rest = np.flatnonzero(~placed)
    spine[rest] = least_loaded(
        first[rest], last[rest], size[rest], np.zeros(len(rest)), fabric, up, down
    )
    _improve(first, last, size, spine, up, down, rate)
    return spine


def _improve(
    first: np.ndarray,
    last: np.ndarray,
    size: np.ndarray,
    spine: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    rate: np.ndarray,
) -> None:
    """Move one piece after the other off the busiest link, while its load falls."""
    live = rate > 0
    cost = np.where(live, 1.0, 0.0) / np.where(live, rate, 1.0)
    for _ in range(4 * rate.size):
        leaving = up.max() >= down.max()
        load, leaf = (up, first) if leaving else (down, last)
        where = int(load.argmax())
        at, worst_spine = divmod(where, rate.shape[1])
        worst = load.flat[where]
        moved = False
        for row in np.flatnonzero((leaf == at) & (spine == worst_spine)).tolist():
            a, b, bytes_ = first[row], last[row], size[row]
            after = np.maximum(up[a] + bytes_ * cost[a], down[b] + bytes_ * cost[b])
            after[~(live[a] & live[b])] = np.inf
            after[worst_spine] = np.inf
            best = int(after.argmin())
            if after[best] < worst * (1 - 1e-9):
                up[a, worst_spine] -= bytes_ * cost[a, worst_spine]
                down[b, worst_spine] -= bytes_ * cost[b, worst_spine]
                up[a, best] += bytes_ * cost[a, best]
                down[b, best] += bytes_ * cost[b, best]
                spine[row] = best
                moved = True
                break
        if not moved:
            return
