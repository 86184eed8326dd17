"""The tables of a lake, as the footers of their Parquet files describe them; no data is read.

Columns are matched by their normalized names: without spaces around them, and in lower case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from shoal.core.errors import DataError
from shoal.corpora.files import find_files
from shoal.fields.data.readers import arrow

# Who writes whole minima and maxima of text, or none.
_WHOLE = "parquet-cpp"
# Kind -> the type in which DuckDB compares its values; what is not here has to be of one type.
_COMPARED_AS = {
    "integer": "BIGINT",
    "float": "DOUBLE",
    "text": "VARCHAR",
    "binary": "BLOB",
    "timestamp": "TIMESTAMP",
}
# Kinds whose least and greatest values are looked at.
_ORDERED = ("integer", "float", "text", "binary", "date", "boolean")


class LakeColumn(NamedTuple):
    """One column of a table.

    Args:
        name: as the file has it.
        kind: columns of one kind can be compared: ``integer``, ``float``, ``text`` ...
        type: of Arrow.
        low: least value, None where the footer does not say, or may not say all of it.
        high: greatest value.
        nulls: how many; None where the footer does not say.
        num_bytes: as stored.
    """

    name: str
    kind: str
    type: Any
    low: Any
    high: Any
    nulls: int | None
    num_bytes: int


@dataclass(frozen=True)
class LakeTable:
    """One Parquet file.

    Args:
        name: path relative to the lake.
        path: of the file.
        rows: how many.
        num_bytes: as stored.
        columns: normalized name -> column.
    """

    name: str
    path: str
    rows: int
    num_bytes: int
    columns: Mapping[str, LakeColumn]

    def bytes_of(self, columns: Any) -> int:
        """Bytes as stored of some columns, by normalized names."""
        return sum(self.columns[name].num_bytes for name in columns)


@dataclass
class Lake:
    """Tables, and what could not be read.

    Args:
        tables: in the order of their names.
        problems: (table, what is wrong with it); these are left out.
    """

    tables: list[LakeTable]
    problems: list[tuple[str, str]] = field(default_factory=list)

    @cached_property
    def compared_as(self) -> dict[tuple[str, str], str]:
        """(Column, kind) -> type of DuckDB in which its values are compared; empty for its own."""
        wide = {
            name
            for table in self.tables
            for name, column in table.columns.items()
            if str(column.type) == "uint64"
        }
        types = {
            (name, column.kind): _COMPARED_AS.get(column.kind, "")
            for table in self.tables
            for name, column in table.columns.items()
        }
        return {
            (name, kind): "HUGEINT" if kind == "integer" and name in wide else type_
            for (name, kind), type_ in types.items()
        }


def open_lake(
    where: str, *, pattern: str = "*", tick: Callable[[float], None] = lambda done: None
) -> Lake:
    """The Parquet files of a directory.

    Args:
        where: a directory of this machine.
        pattern: of the names of files; ``*`` also matches ``/``.
        tick: called with the share that is read.

    Raises:
        DataError: nothing is there, or it is no directory of this machine.
    """
    if "://" in where or where == "stdlib":
        raise DataError(
            f"data = {where!r}: the tables of a directory of this machine are compared; give one "
            "with Parquet files"
        )
    listing = find_files(where, pattern, option="data")
    lake = Lake([])
    for at, file in enumerate(listing.files):
        path = listing.url(file)
        try:
            if not file.name.lower().endswith((".parquet", ".pq")):
                raise DataError("no Parquet file; convert it to be compared")
            if any(letter in path for letter in "*?["):
                raise DataError("a name with *, ? or [ stands for several files; rename it")
            lake.tables.append(_table(file.name, path, file.num_bytes))
        except DataError as cause:
            lake.problems.append((file.name, str(cause)))
        tick((at + 1) / len(listing.files))
    return lake


def _table(name: str, path: str, num_bytes: int) -> LakeTable:
    pa, parquet = arrow(), arrow("parquet")
    try:
        with parquet.ParquetFile(path) as file:
            schema, footer = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as cause:
        reason = str(cause).partition("\n")[0]
        raise DataError(f"its footer cannot be read ({reason}); repair or remove it") from cause
    columns: dict[str, LakeColumn] = {}
    for one, chunks in zip(schema, _chunks(schema, footer), strict=True):
        normal = one.name.strip().casefold()
        if normal in columns:
            raise DataError(f"two columns are called {normal!r}; rename one")
        columns[normal] = _column(one, chunks, footer)
    if not columns:
        raise DataError("it has no column")
    return LakeTable(name, path, footer.num_rows, num_bytes, columns)


def _chunks(schema: Any, footer: Any) -> list[list[Any]]:
    """The chunks of each column; none where the file has others than its schema says."""
    leaves = [_leaves(one.type) for one in schema]
    result: list[list[Any]] = [[] for _ in leaves]
    if sum(leaves) != footer.num_columns:
        return result
    # By place, not by name: a dot in a name looks like a nested column.
    of = [column for column, count in enumerate(leaves) for _ in range(count)]
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group)
        for at, column in enumerate(of):
            result[column].append(rows.column(at))
    return result


def _leaves(type_: Any) -> int:
    """Columns of Parquet that hold a type of Arrow."""
    types = arrow("types")
    if types.is_dictionary(type_):
        return _leaves(type_.value_type)
    return sum(_leaves(type_.field(at).type) for at in range(type_.num_fields)) or 1


def _column(one: Any, chunks: list[Any], footer: Any) -> LakeColumn:
    kind, writer = kind_of_type(one.type), footer.created_by or ""
    low = high = None
    nulls: int | None = 0
    known = kind in _ORDERED and len(chunks) == footer.num_row_groups
    for chunk in chunks:
        stats = chunk.statistics if known else None
        if stats is None or not stats.has_null_count:
            nulls = None
        elif nulls is not None:
            nulls += stats.null_count
        empty = stats is not None and stats.has_null_count and stats.num_values == 0
        if empty:  # nothing but nulls
            continue
        ends = None if stats is None else _ends(stats, kind, writer)
        if ends is None:
            low = high = None
            known = False
            continue
        low = ends[0] if low is None else min(low, ends[0])
        high = ends[1] if high is None else max(high, ends[1])
    if not known:
        low = high = None
    size = sum(chunk.total_compressed_size for chunk in chunks)
    return LakeColumn(one.name, kind, one.type, low, high, nulls, size)


def _ends(stats: Any, kind: str, writer: str) -> tuple[Any, Any] | None:
    """Least and greatest value of a chunk; None where they are unknown or may be cut short."""
    if not stats.has_min_max:
        return None
    if kind in ("text", "binary"):
        exact = [getattr(stats, f"is_{end}_value_exact", None) for end in ("min", "max")]
        if False in exact or (None in exact and not writer.startswith(_WHOLE)):
            return None
    try:
        low, high = stats.min, stats.max
    except (ValueError, OverflowError, UnicodeDecodeError):
        return None
    if low is None or high is None:
        return None
    if kind == "float" and (math.isnan(low) or math.isnan(high)):
        return None
    return low, high


def kind_of_type(type_: Any) -> str:
    """What values of a type of Arrow can be compared with."""
    types = arrow("types")
    if types.is_dictionary(type_):
        return kind_of_type(type_.value_type)
    for kind, tests in {
        "boolean": (types.is_boolean,),
        "integer": (types.is_integer,),
        "float": (types.is_float32, types.is_float64),
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "binary": (types.is_binary, types.is_large_binary),
        "date": (types.is_date32,),
    }.items():
        if any(test(type_) for test in tests):
            return kind
    if types.is_timestamp(type_) and type_.tz is None and type_.unit != "ns":
        return "timestamp"
    return str(type_)
