"""Retention: never dearer than a greedy plan, as good as trying all, and what goes comes back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("duckdb")

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError
from shoal.fields.data.lake import ContainmentFinder, RetentionPlanner, open_lake
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.recipes import different, read_table, recipe_of
from shoal.fields.data.lake.retention import by_program, by_tree, solve_retention

PRICES = st.floats(0, 10).map(lambda x: round(x, 3))
Edges = dict[tuple[int, int], float]


def cost(keep: list[float], rebuild: Edges, kept: set[int]) -> float:
    """The least with exactly these tables kept."""
    total = sum(keep[v] for v in kept)
    for v in set(range(len(keep))) - kept:
        total += min(
            (p for (u, w), p in rebuild.items() if w == v and u in kept), default=float("inf")
        )
    return total


def exhaustive(keep: list[float], rebuild: Edges) -> float:
    n = len(keep)
    return min(
        cost(keep, rebuild, set(kept))
        for size in range(n + 1)
        for kept in itertools.combinations(range(n), size)
    )


def greedy(keep: list[float], rebuild: Edges) -> float:
    """Drop what saves most, as long as something does."""
    kept = set(range(len(keep)))
    while True:
        best = min((cost(keep, rebuild, kept - {v}) for v in kept), default=float("inf"))
        if best >= cost(keep, rebuild, kept):
            return cost(keep, rebuild, kept)
        kept -= {min(kept, key=lambda v: cost(keep, rebuild, kept - {v}))}


@st.composite
def problems(draw: Any, most: int = 8) -> tuple[list[float], Edges]:
    n = draw(st.integers(1, most))
    keep = draw(st.lists(PRICES, min_size=n, max_size=n))
    pairs = [(u, v) for u in range(n) for v in range(n) if u != v]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    return keep, {edge: draw(PRICES) for edge in edges}


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_program_is_as_good_as_trying_all(problem: tuple[list[float], Edges]) -> None:
    keep, rebuild = problem
    for plan in (by_program(keep, rebuild), solve_retention(keep, rebuild)):
        assert plan.cost == pytest.approx(exhaustive(keep, rebuild), abs=1e-6)
        assert plan.cost <= greedy(keep, rebuild) + 1e-6
        assert sorted([*plan.kept, *plan.rebuilt]) == list(range(len(keep)))
        assert all(u in plan.kept and (u, v) in rebuild for v, u in plan.rebuilt.items())


def test_twelve_tables() -> None:
    draw = np.random.default_rng(0)
    keep = draw.uniform(0, 5, 12).tolist()
    rebuild = {
        (u, v): float(draw.uniform(0, 5))
        for u in range(12)
        for v in range(12)
        if u != v and draw.random() < 0.3
    }
    assert by_program(keep, rebuild).cost == pytest.approx(exhaustive(keep, rebuild), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_on_trees_the_dynamic_program_is_as_good(data: Any) -> None:
    n = data.draw(st.integers(1, 20))
    keep = data.draw(st.lists(PRICES, min_size=n, max_size=n))
    order = data.draw(st.permutations(range(n)))
    rebuild = {}
    for at in range(1, n):
        if data.draw(st.booleans()):
            parent = data.draw(st.integers(0, at - 1))
            rebuild[order[parent], order[at]] = data.draw(PRICES)
    plan = by_tree(keep, rebuild)
    assert plan.cost == pytest.approx(by_program(keep, rebuild).cost, abs=1e-6)
    assert all(u in plan.kept for u in plan.rebuilt.values())


def test_equal_tables_keep_one() -> None:
    edges = [(u, v) for u in range(4) for v in range(4) if u != v]
    plan = RetentionPlanner(accesses=0.0).plan([1e9] * 4, edges)
    assert len(plan.kept) == 1
    assert set(plan.rebuilt.values()) == set(plan.kept)
    ring = {(0, 1): 0.0, (1, 2): 0.0, (2, 0): 0.0}
    assert solve_retention([1.0, 1.0, 1.0], ring).cost == exhaustive([1.0] * 3, ring)


def test_what_takes_too_long_is_kept() -> None:
    edges = [(0, 1)]
    slow = RetentionPlanner(latency_s=1.0, read_mb_s=100.0).plan([1e9, 1e6], edges)
    assert slow.kept == [0, 1]
    assert slow.cost == slow.all_kept
    assert RetentionPlanner(latency_s=30.0, accesses=0.0).plan([1e9, 1e6], edges).rebuilt == {1: 0}
    assert RetentionPlanner(accesses=1e6).plan([1e9, 1e6], edges).rebuilt == {}
    with pytest.raises(ConfigError, match="read_mb_s = 0: expected"):
        RetentionPlanner(read_mb_s=0)
    assert RetentionPlanner().plan([], []).kept == []


def test_a_deleted_table_comes_back_bit_by_bit(tmp_path: Path) -> None:
    nan = float("nan")
    parent = pa.table(
        {
            "A": pa.array([1, 2, 2, 3, None], pa.int64()),
            "b": pa.array([0.0, -0.0, nan, 1.5, None], pa.float64(), from_pandas=False),
            "c": pa.array(["x", "y", "y", None, "ü"]),
            "d": pa.array([[1], [], None, [2, None], [3]]),
        }
    )
    child = parent.take(pa.array([4, 1, 1, 0, 2, 3])).select(["d", "c", "b", "A"])
    child = child.set_column(3, "a", child.column("A").cast(pa.int32()))
    child = child.set_column(1, "C", child.column("c").dictionary_encode())
    pq.write_table(parent, tmp_path / "parent.parquet")
    pq.write_table(child, tmp_path / "child.parquet")
    lake = open_lake(str(tmp_path))
    assert (1, 0) in ContainmentFinder(verify="full").find(lake).edges
    original = read_table(lake.tables[0], None)
    with LakeQueries(lake) as queries:
        recipe = recipe_of(queries, lake.tables[1], lake.tables[0])
    (tmp_path / "child.parquet").unlink()
    rebuilt = recipe.rebuild(lake.tables[1], original.schema)
    assert different(rebuilt, original) == ""
    assert rebuilt.column("b").to_numpy().tobytes() == original.column("b").to_numpy().tobytes()
    recipe.save(tmp_path / "recipe.parquet")
    rows = pq.read_table(tmp_path / "recipe.parquet").column("row").to_pylist()
    assert rows == [4, 1, 1, 0, 2, 3]


def test_a_recipe_that_would_not_be_the_same_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1.0, 3.0]}), tmp_path / "b.parquet")
    lake = open_lake(str(tmp_path))
    with LakeQueries(lake) as queries, pytest.raises(DataError, match="1 rows do not occur"):
        recipe_of(queries, lake.tables[0], lake.tables[1])


@pytest.mark.parametrize(
    ("one", "other", "column"),
    [
        ([0.0], [-0.0], "x"),
        ([1.0], [None], "x"),
        ([1], [1.0], "x"),
        (["a"], ["b"], "x"),
        ([1.0], [1.0, 2.0], "their names or numbers of rows"),
        ([1.0, None], [1.0, None], ""),
    ],
)
def test_tables_that_differ(one: list[Any], other: list[Any], column: str) -> None:
    assert different(pa.table({"x": one}), pa.table({"x": other})) == column
