"""RetentionPlanner: which contained tables need not be kept, because they can be rebuilt in time.

Source: Shah et al., R2D2, 2023, section 7. Keeping table v costs its storage and maintenance;
rebuilding it from a kept table u costs accesses times the price of reading u, selecting, and
writing v. The cheapest choice is an integer program, solved by HiGHS; on chains and trees a dynamic
program finds the same in linear time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, PlanError
from shoal.fields.data.lake.schema_graph import Edge


class RetentionPlan(NamedTuple):
    """What to keep.

    Args:
        kept: tables.
        rebuilt: table that need not be kept -> the kept table that it is rebuilt from.
        cost: in USD a month.
        all_kept: what keeping everything would cost.
    """

    kept: list[int]
    rebuilt: dict[int, int]
    cost: float
    all_kept: float


@dataclass(frozen=True, kw_only=True)
class RetentionPlanner:
    """Choose the tables that are kept, at the least cost a month.

    Args:
        storage_usd: USD a GB and month.
        maintenance_usd: USD a table and month, such as for access control and backups.
        accesses: of a table in a month, in the mean.
        compute_usd: USD an hour of a machine that rebuilds.
        read_mb_s: MB a second that are read and filtered.
        write_mb_s: MB a second that are written.
        latency_s: longest time that rebuilding may take.

    Raises:
        ConfigError: a negative number, or a rate of 0.
    """

    storage_usd: float = 0.023
    maintenance_usd: float = 0.0
    accesses: float = 0.1
    compute_usd: float = 0.4
    read_mb_s: float = 200.0
    write_mb_s: float = 100.0
    latency_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or (name.endswith("_s") and value == 0):
                raise ConfigError(f"{name} = {value:g}: expected a number above 0")

    def rebuild_s(self, parent_bytes: float, child_bytes: float) -> float:
        """Seconds to read a parent, select the child's rows, and write them."""
        return parent_bytes / (1e6 * self.read_mb_s) + child_bytes / (1e6 * self.write_mb_s)

    def costs(
        self, sizes: Sequence[float], edges: Sequence[Edge]
    ) -> tuple[list[float], dict[Edge, float]]:
        """USD a month: of keeping each table, and of each edge that is quick enough.

        Args:
            sizes: bytes of each table.
            edges: (parent, child).
        """
        keep = [self.storage_usd * size / 1e9 + self.maintenance_usd for size in sizes]
        rebuild = {
            (u, v): self.accesses * seconds * self.compute_usd / 3600.0
            for u, v in edges
            if u != v and (seconds := self.rebuild_s(sizes[u], sizes[v])) <= self.latency_s
        }
        return keep, rebuild

    def plan(self, sizes: Sequence[float], edges: Sequence[Edge]) -> RetentionPlan:
        """The cheapest choice.

        Args:
            sizes: bytes of each table.
            edges: (parent, child): the child can be rebuilt from the parent.

        Raises:
            PlanError: the solver fails.
        """
        return solve_retention(*self.costs(sizes, edges))


def solve_retention(keep: Sequence[float], rebuild: Mapping[Edge, float]) -> RetentionPlan:
    """Minimize the cost: a tree by dynamic programming, anything else by HiGHS.

    Args:
        keep: cost of keeping each table.
        rebuild: (parent, child) -> cost of rebuilding the child from the parent, if that is kept.

    Raises:
        PlanError: the solver fails.
    """
    parents: dict[int, int] = {}
    for u, v in rebuild:
        if v in parents:
            return by_program(keep, rebuild)
        parents[v] = u
    for start in parents:  # one parent each, and still perhaps a cycle
        at, steps = start, 0
        while at in parents and steps <= len(parents):
            at, steps = parents[at], steps + 1
        if steps > len(parents):
            return by_program(keep, rebuild)
    return by_tree(keep, rebuild)


def by_program(keep: Sequence[float], rebuild: Mapping[Edge, float]) -> RetentionPlan:
    """The integer program: each table is kept, or rebuilt from one that is."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    n, edges = len(keep), list(rebuild)
    if not n:
        return RetentionPlan([], {}, 0.0, 0.0)
    m = len(edges)
    columns = n + np.arange(m)
    child = np.array([v for _, v in edges], np.int64)
    parent = np.array([u for u, _ in edges], np.int64)
    # x_v + sum of y_uv = 1, and y_uv <= x_u.
    once = csr_array(
        (
            np.ones(n + m),
            (np.concatenate([np.arange(n), child]), np.concatenate([np.arange(n), columns])),
        ),
        shape=(n, n + m),
    )
    constraints = [LinearConstraint(once, 1, 1)]
    if m:
        from_kept = csr_array(
            (
                np.concatenate([np.ones(m), -np.ones(m)]),
                (np.tile(np.arange(m), 2), np.concatenate([columns, parent])),
            ),
            shape=(m, n + m),
        )
        constraints.append(LinearConstraint(from_kept, -np.inf, 0))
    cost = np.array([*keep, *(rebuild[edge] for edge in edges)])
    # HiGHS stops within a tolerance: prices of cents must not be lost in it.
    scale = float(np.abs(cost).max()) or 1.0
    solved = milp(
        cost / scale,
        constraints=constraints,
        integrality=np.ones(n + m, np.int64),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        raise PlanError(f"which tables to keep: {solved.message}")
    chosen = solved.x > 0.5
    rebuilt = {v: u for (u, v), use in zip(edges, chosen[n:], strict=True) if use}
    return _result(keep, rebuild, rebuilt)


def by_tree(keep: Sequence[float], rebuild: Mapping[Edge, float]) -> RetentionPlan:
    """The dynamic program, where every table has at most one parent and there is no cycle.

    The least cost of a table's tree if the table is kept, and if it is rebuilt: then its children
    have to be kept.
    """
    parents = {v: u for u, v in rebuild}
    children: dict[int, list[int]] = {}
    for v, u in parents.items():
        children.setdefault(u, []).append(v)
    order = [v for v in range(len(keep)) if v not in parents]
    for u in order:  # grows: parents before children
        order += children.get(u, [])
    kept, gone = list(keep), [float("inf")] * len(keep)
    for v in reversed(order):
        below = children.get(v, [])
        kept[v] = keep[v] + sum(min(kept[c], gone[c]) for c in below)
        if v in parents:
            gone[v] = rebuild[parents[v], v] + sum(kept[c] for c in below)
    rebuilt: dict[int, int] = {}
    for v in order:
        if v in parents and parents[v] not in rebuilt and gone[v] < kept[v]:
            rebuilt[v] = parents[v]
    return _result(keep, rebuild, rebuilt)


def _result(
    keep: Sequence[float], rebuild: Mapping[Edge, float], rebuilt: dict[int, int]
) -> RetentionPlan:
    kept = [v for v in range(len(keep)) if v not in rebuilt]
    cost = sum(keep[v] for v in kept) + sum(rebuild[u, v] for v, u in rebuilt.items())
    return RetentionPlan(kept, rebuilt, cost, float(sum(keep)))
