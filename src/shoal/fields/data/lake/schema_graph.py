"""The first sieve: a table can only contain one whose columns it has.

Source: Shah et al., R2D2, 2023, section 4. Different schemas are sorted, the largest first. Each
joins every group whose center contains it, otherwise it becomes a center; pairs are tested inside
groups. Every schema that contains a child shares a center with it: the center that contains that
schema contains the child too. So no edge is lost.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import NamedTuple

import numpy as np

from shoal.fields.data.lake.tables import Lake

Edge = tuple[int, int]
"""(Parent, child): places in the list of tables."""


class SchemaEdges(NamedTuple):
    """Tables that could contain others by their columns.

    Args:
        edges: (parent, child).
        tested: pairs of different schemas that were tested, centers included.
    """

    edges: list[Edge]
    tested: int


def schema_edges(schemas: Sequence[Set[Hashable]]) -> SchemaEdges:
    """All pairs (parent, child), parent not child, where the child's set is a part of the parent's.

    Args:
        schemas: a set for each table, such as of its columns' names.
    """
    members: dict[frozenset[Hashable], list[int]] = {}
    for at, schema in enumerate(schemas):
        members.setdefault(frozenset(schema), []).append(at)
    distinct = sorted(members, key=lambda schema: -len(schema))
    bits = _bits(distinct)
    groups: list[list[int]] = []
    centers: list[int] = []
    tested = 0
    for at in range(len(distinct)):
        inside = _within(bits[at], bits[centers])
        tested += len(centers)
        for center in np.flatnonzero(inside):
            groups[center].append(at)
        if not inside.any():
            centers.append(at)
            groups.append([at])
    found: set[Edge] = set()
    for group in groups:
        places = np.array(group)
        for position, child in enumerate(group):
            # Sorted by size: only those before can contain it.
            before = places[:position]
            tested += len(before)
            found |= {(int(at), child) for at in before[_within(bits[child], bits[before])]}
    edges = [
        (parent, child)
        for large, small in sorted(found)
        for parent in members[distinct[large]]
        for child in members[distinct[small]]
    ]
    for alike in members.values():
        edges += [(one, other) for one in alike for other in alike if one != other]
    return SchemaEdges(edges, tested)


def lake_schemas(lake: Lake, *, types: bool) -> list[frozenset[Hashable]]:
    """The columns of each table: normalized names, with their kinds if ``types``."""
    return [
        frozenset((name, column.kind) if types else name for name, column in table.columns.items())
        for table in lake.tables
    ]


def _bits(schemas: Sequence[frozenset[Hashable]]) -> np.ndarray:
    """Uint64 [n, words]: a bit for each name."""
    place: dict[Hashable, int] = {}
    for schema in schemas:
        for name in schema:
            place.setdefault(name, len(place))
    bits = np.zeros((len(schemas), max(1, -(-len(place) // 64))), np.uint64)
    for at, schema in enumerate(schemas):
        for name in schema:
            bits[at, place[name] // 64] |= np.uint64(1 << place[name] % 64)
    return bits


def _within(child: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Bool [n]: whether the parents have every bit of the child."""
    result: np.ndarray = ((child & ~parents) == 0).all(axis=1)
    return result
