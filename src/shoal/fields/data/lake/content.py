"""The third sieve: some rows of the child are looked up in the parent.

Source: Shah et al., R2D2, 2023, section 6. A row that the parent lacks ends an edge, so no true
edge is lost. A child of which at most a share 1 - e is contained passes t rows with probability at
most (1 - e)^t: :func:`rows_for` says how many rows are enough.
"""

# ruff: noqa: S608 - made of numbers and of the quoted names of ``queries.py``.

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from shoal.core.random import generator
from shoal.fields.data.lake.queries import LakeQueries, listed
from shoal.fields.data.lake.schema_graph import Edge
from shoal.fields.data.lake.tables import LakeTable

SampledColumns = tuple[tuple[str, str], ...]
"""(Normalized name, kind) of the columns of a sample."""


def rows_for(missing: float, chance: float) -> int:
    """Rows with which a child that lacks a share of its rows passes with this chance at most."""
    return math.ceil(math.log(chance) / math.log(1 - missing))


def sampled_edges(
    queries: LakeQueries,
    edges: Sequence[Edge],
    *,
    columns: int,
    rows: int,
    seed: int,
    tick: Callable[[float], None] = lambda done: None,
) -> list[Edge]:
    """The edges whose sampled rows all occur in the parent.

    A table has one sample, the same for all its parents, and a parent is asked once about all
    children whose samples have the same columns.

    Args:
        queries: to the tables.
        edges: (parent, child).
        columns: of the child that are looked at; the order among names is drawn once for all
            tables, so that children that resemble each other have the same.
        rows: of the child.
        seed: of columns and rows.
        tick: called with the share that is done.
    """
    tables = queries.lake.tables
    of: dict[int, SampledColumns] = {}
    by_columns: dict[SampledColumns, list[int]] = defaultdict(list)
    for child in sorted({child for _, child in edges if tables[child].rows}):
        some = _columns(tables[child], columns, seed)
        of[child] = tuple((name, tables[child].columns[name].kind) for name in some)
        by_columns[of[child]].append(child)
    sample = {names: f"sample{at}" for at, names in enumerate(by_columns)}
    for names, children in by_columns.items():
        _sample(queries, sample[names], [name for name, _ in names], children, rows, seed)
    asked: dict[tuple[int, SampledColumns], list[int]] = defaultdict(list)
    for parent, child in edges:
        if child in of:
            asked[parent, of[child]].append(child)
    dead: set[Edge] = set()
    for done, ((parent, names), children) in enumerate(asked.items()):
        only = [name for name, _ in names]
        lost = _lost(queries, tables[parent], sample[names], only, children)
        dead |= {(parent, child) for child in lost}
        tick((done + 1) / len(asked))
    return [edge for edge in edges if edge not in dead]


def _columns(table: LakeTable, count: int, seed: int) -> list[str]:
    """Some columns of a table, those that are drawn first among all names."""

    def drawn(name: str) -> bytes:
        return hashlib.sha256(f"{seed}|{name}".encode()).digest()

    return sorted(table.columns, key=drawn)[:count]


def _sample(
    queries: LakeQueries,
    name: str,
    names: Sequence[str],
    children: Sequence[int],
    rows: int,
    seed: int,
) -> None:
    """Rows of some children in a table of DuckDB, each with the number of its child."""
    parts = []
    for child in children:
        table = queries.lake.tables[child]
        draw = generator(seed, purpose="sampled rows", index=child)
        some = draw.choice(table.rows, min(rows, table.rows), replace=False)
        condition = f"file_row_number IN {listed(sorted(some.tolist()))}"
        parts.append(
            f"SELECT {child} AS child, * FROM ({queries.rows(table, names, where=condition)})"
        )
        queries.bytes_read += table.bytes_of(names)
    queries.ask(f"CREATE TEMP TABLE {name} AS {' UNION ALL '.join(parts)}")


def _lost(
    queries: LakeQueries,
    parent: LakeTable,
    sample: str,
    names: Sequence[str],
    children: Sequence[int],
) -> list[int]:
    """The children of which the parent lacks a sampled row."""
    keys = [k for k, _ in queries.keys(parent, names)]
    same = " AND ".join(f"c.{k} IS NOT DISTINCT FROM p.{k}" for k in keys)
    # The parent's rows that can matter: their first column is one of the sampled values.
    inside = f"SELECT {keys[0]} FROM {sample} WHERE child IN {listed(children)}"
    queries.bytes_read += parent.bytes_of(names)
    answer = queries.ask(
        f"SELECT DISTINCT child FROM {sample} c ANTI JOIN (SELECT * FROM "
        f"({queries.rows(parent, names)}) WHERE {keys[0]} IN ({inside}) OR {keys[0]} IS NULL) p "
        f"ON {same} WHERE child IN {listed(children)}"
    )
    return [child for (child,) in answer]
