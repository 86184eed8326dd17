"""The exact optimum of what the layer-wise search looks for, as a mixed-integer programme.

A plan is a path: from layer to layer, in a stage, with a strategy. Going on in the same stage costs
the change of layout, going on to the next stage is free of it; the bytes of a stage's layers are
within its memory. The step of 1F1B, ``sum of stages + (m - 1) slowest + what is spent once``, is
linear in such paths and two maxima. HiGHS solves it; the memory is not rounded to a grid.

For judging the search, not for planning: it takes seconds to minutes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from shoal.cost.training.layer_plan import in_flight
from shoal.cost.training.memory import ALLOCATOR_SLACK, RUNTIME_BYTES
from shoal.plan.strategy.layer_search import StageSearch, undominated


class Optimum(NamedTuple):
    """Seconds of the best step, infinite where nothing fits, and a proven lower bound."""

    seconds: float
    bound: float


class _Rows:
    """Constraints, row by row."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.low)
        self.entries += [(row, column, value) for column, value in terms]
        self.low.append(low)
        self.high.append(high)


def optimum(search: StageSearch, *, above: float = math.inf, timeout_s: float = 60.0) -> Optimum:
    """The least seconds of a step over every cut and every strategy of every layer.

    Nothing is solved where the relaxed programme is no better than ``above``, a step that is known.
    """
    layers, pp, m = search.layers, search.pp, search.microbatches
    count = len(layers)
    ends = {0: "embed", count - 1: "head"} if count > 1 else {0: "both"}
    table = [
        {
            s: search.pricer.layer(layer, s, search.sequences, pp, ends.get(at, ""))
            for s in search.strategies
        }
        for at, layer in enumerate(layers)
    ]
    kept = sorted({s for row in table for s in undominated(list(row.items()), 1)})
    kept = sorted(
        {*kept, *(s for row in table for s in undominated(list(row.items()), min(pp, m)))}
    )
    n = len(kept)
    held = [in_flight(search.pricer.job.parallel.schedule.name, p, pp, m) for p in range(pp)]
    room = search.usable - RUNTIME_BYTES[search.pricer.machine.device.kind]
    room /= 1 + ALLOCATOR_SLACK
    boundary = search.pricer.boundary_s(search.sequences, kept[0].layout, pp)
    hidden = layers[0].shape.hidden
    layouts = sorted({s.layout for s in kept})
    change = np.array(
        [
            [search.pricer.change(a, b, hidden, search.sequences, pp) for b in layouts]
            for a in layouts
        ]
    )
    g = len(layouts)
    members = [[j for j, s in enumerate(kept) if s.layout == layout] for layout in layouts]
    # Columns: x[l, p, s]; between layers, by layout, stay[l, p, a, b], leave[l, p, a] and
    # enter[l, p, b]; per stage the transient memory; the slowest stage and the longest end.
    x = np.arange(count * pp * n).reshape(count, pp, n)
    size = x.size
    stay = size + np.arange((count - 1) * pp * g * g).reshape(count - 1, pp, g, g)
    size += stay.size
    leave = size + np.arange((count - 1) * (pp - 1) * g).reshape(count - 1, pp - 1, g)
    size += leave.size
    enter = size + np.arange((count - 1) * (pp - 1) * g).reshape(count - 1, pp - 1, g)
    size += enter.size
    transient = size + np.arange(pp)
    slowest, longest = size + pp, size + pp + 1
    size += pp + 2
    # In units of the whole step and of the whole memory, as solvers like them.
    unit = sum(min(c.micro_s for c in row.values()) for row in table) * m / pp
    rows = _Rows()
    for p in range(pp):
        micro = [
            (int(x[at, p, j]), table[at][s].micro_s / unit)
            for at in range(count)
            for j, s in enumerate(kept)
        ]
        micro += [
            (int(stay[at, p, i, j]), change[i, j] / unit)
            for at in range(count - 1)
            for i in range(g)
            for j in range(g)
            if change[i, j]
        ]
        own = 2 * boundary / unit
        rows.add([*micro, (slowest, -1.0)], -np.inf, -own)
        once = [
            (int(x[at, p, j]), table[at][s].once_s / unit)
            for at in range(count)
            for j, s in enumerate(kept)
        ]
        rows.add([*once, (longest, -1.0)], -np.inf, 0.0)
        filled = [
            (
                int(x[at, p, j]),
                (table[at][s].resident_bytes + held[p] * table[at][s].held_bytes) / room,
            )
            for at in range(count)
            for j, s in enumerate(kept)
        ]
        rows.add([*filled, (int(transient[p]), 1.0)], -np.inf, 1.0)
        for at in range(count):
            # A layer has one strategy, so one row holds all of them.
            most = [
                (int(x[at, p, j]), table[at][s].transient_bytes / room) for j, s in enumerate(kept)
            ]
            rows.add([*most, (int(transient[p]), -1.0)], -np.inf, 0.0)
    for at in range(count):
        rows.add([(int(c), 1.0) for c in x[at].ravel()], 1.0, 1.0)
        for p in range(pp):
            for j in range(g):
                here = [(int(x[at, p, member]), -1.0) for member in members[j]]
                if at + 1 < count:
                    out = [(int(c), 1.0) for c in stay[at, p, j]]
                    out += [(int(leave[at, p, j]), 1.0)] if p + 1 < pp else []
                    rows.add(here + out, 0.0, 0.0)
                if at:
                    came = [(int(c), 1.0) for c in stay[at - 1, p, :, j]]
                    came += [(int(enter[at - 1, p - 1, j]), 1.0)] if p else []
                    rows.add(here + came, 0.0, 0.0)
    for at in range(count - 1):
        for p in range(pp - 1):
            through = [(int(c), 1.0) for c in leave[at, p]]
            through += [(int(c), -1.0) for c in enter[at, p]]
            rows.add(through, 0.0, 0.0)
    upper = np.full(size, 1.0)
    upper[[slowest, longest]] = np.inf
    first_elsewhere = x[0, 1:].ravel() if pp > 1 else np.array([], dtype=int)
    last_elsewhere = x[-1, : pp - 1].ravel() if pp > 1 else np.array([], dtype=int)
    upper[first_elsewhere] = 0.0
    upper[last_elsewhere] = 0.0
    cost = np.zeros(size)
    for at in range(count):
        for j, s in enumerate(kept):
            cost[x[at, :, j]] = table[at][s].micro_s / unit
    cost[stay] = np.broadcast_to(change / unit, stay.shape)
    cost[slowest], cost[longest] = m - 1.0, 1.0
    fixed = 2 * boundary * pp
    line, column, value = zip(*rows.entries, strict=True)
    matrix = coo_array((value, (line, column)), shape=(len(rows.low), size)).tocsr()
    constraint = LinearConstraint(matrix, np.array(rows.low), np.array(rows.high))
    whole = np.zeros(size, dtype=np.int64)
    bounds = Bounds(np.zeros(size), upper)
    relaxed = milp(cost, constraints=constraint, bounds=bounds, integrality=whole)
    if relaxed.status == 2:
        return Optimum(math.inf, math.inf)
    assert relaxed.fun is not None
    least = float(relaxed.fun) * unit + fixed
    if least >= above:
        return Optimum(above, least)
    whole[: x.size] = 1
    result = milp(
        cost,
        constraints=constraint,
        bounds=bounds,
        integrality=whole,
        options={"time_limit": timeout_s, "mip_rel_gap": 1e-6},
    )
    if result.status == 2:
        return Optimum(math.inf, math.inf)
    bound = least
    if result.mip_dual_bound is not None:
        bound = max(bound, float(result.mip_dual_bound) * unit + fixed)
    # Out of time there may be no plan yet.
    seconds = float(result.fun) * unit + fixed if result.fun is not None else math.inf
    return Optimum(seconds, bound)
