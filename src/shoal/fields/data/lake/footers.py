"""The second sieve: values beyond the parent's least or greatest cannot occur in it.

Source: Shah et al., R2D2, 2023, section 5. What the footer does not say prunes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from shoal.fields.data.lake.schema_graph import Edge
from shoal.fields.data.lake.tables import Lake, LakeTable

RowSemantics: TypeAlias = Literal["set", "bag"]
"""Whether rows that occur several times in the child must do so in the parent."""


def clashes(parent: LakeTable, child: LakeTable) -> list[str]:
    """What cannot be compared: columns of one name and different kinds."""
    return [
        f"column {name!r} is {parent.columns[name].type} in {parent.name} and {column.type} in "
        f"{child.name}"
        for name, column in child.columns.items()
        if name in parent.columns and parent.columns[name].kind != column.kind
    ]


def may_contain(parent: LakeTable, child: LakeTable, semantics: RowSemantics) -> bool:
    """Whether the footers allow that all rows of the child occur in the parent.

    Args:
        parent: has the child's columns, of the same kinds.
        child: the table that may be contained.
        semantics: ``bag`` where a child cannot have more rows than its parent.
    """
    if child.rows == 0:
        return True
    if parent.rows == 0 or (semantics == "bag" and child.rows > parent.rows):
        return False
    for name, column in child.columns.items():
        other = parent.columns[name]
        if column.nulls and other.nulls == 0:
            return False
        if None in (column.low, column.high, other.low, other.high):
            continue
        if other.low > column.low or column.high > other.high:
            return False
    return True


def footer_edges(lake: Lake, edges: Sequence[Edge], semantics: RowSemantics) -> list[Edge]:
    """The edges that the footers allow."""
    tables = lake.tables
    return [
        (parent, child)
        for parent, child in edges
        if may_contain(tables[parent], tables[child], semantics)
    ]
