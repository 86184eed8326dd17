"""How a table is rebuilt from another: which rows and columns, executed and compared before use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import open_atomic
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.tables import LakeTable
from shoal.fields.data.readers import arrow


@dataclass(frozen=True)
class TableRecipe:
    """A table as rows and columns of another.

    Args:
        table: what is rebuilt, by name.
        parent: what it is rebuilt from.
        columns: (column of the table, column of the parent), in the table's order.
        rows: int64, rows of the parent in the table's order.
    """

    table: str
    parent: str
    columns: tuple[tuple[str, str], ...]
    rows: Any

    def rebuild(self, parent: LakeTable, schema: Any) -> Any:
        """The table, with a schema of Arrow's.

        Raises:
            DataError: the parent cannot be read, or has changed.
        """
        pa = arrow()
        whole = read_table(parent, [source for _, source in self.columns])
        if len(self.rows) and int(self.rows.max()) >= whole.num_rows:
            raise DataError(f"{parent.name}: has fewer rows than when {self.table} was compared")
        picked = whole.take(pa.array(self.rows))
        arrays = [
            _as_type(picked.column(source), schema.field(name).type)
            for name, source in self.columns
        ]
        return pa.table(arrays, schema=schema)

    def save(self, path: Path) -> None:
        """Write the rows, as Parquet; one column ``row``."""
        pa, parquet = arrow(), arrow("parquet")
        with open_atomic(path, error=DataError) as file:
            parquet.write_table(
                pa.table({"row": pa.array(self.rows, pa.int64())}),
                file,
                compression="zstd",
                use_dictionary=False,
                column_encoding={"row": "DELTA_BINARY_PACKED"},
            )


def recipe_of(queries: LakeQueries, parent: LakeTable, child: LakeTable) -> TableRecipe:
    """The recipe of a table, which has been executed and compared bit by bit.

    Raises:
        DataError: a row does not occur in the parent, or the rebuilt table is not the same.
    """
    rows = np.array(queries.row_ids(parent, child), np.int64)
    columns = tuple(
        (column.name, parent.columns[name].name) for name, column in child.columns.items()
    )
    recipe = TableRecipe(child.name, parent.name, columns, rows)
    original = read_table(child, None)
    difference = different(recipe.rebuild(parent, original.schema), original)
    if difference:
        raise DataError(
            f"{child.name}: rebuilt from {parent.name}, column {difference!r} differs in its "
            "bits; it is kept"
        )
    return recipe


def read_table(table: LakeTable, columns: list[str] | None) -> Any:
    """Columns of a file, as Arrow, without metadata.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with arrow("parquet").ParquetFile(table.path) as file:
            whole = file.read(columns=columns, use_threads=False)
    except (arrow().ArrowException, OSError) as cause:
        raise DataError(f"{table.name}: cannot be read ({cause})") from cause
    return whole.replace_schema_metadata(None)


def different(one: Any, other: Any) -> str:
    """Name of the first column in which two tables differ in a bit; empty if none does.

    Types have to be the same, and rows in the same order. What lies under a null does not count.
    """
    if one.schema.names != other.schema.names or one.num_rows != other.num_rows:
        return "their names or numbers of rows"
    for name in one.schema.names:
        if one.schema.field(name).type != other.schema.field(name).type:
            return str(name)
        if not _same_bits(one.column(name), other.column(name)):
            return str(name)
    return ""


def _same_bits(one: Any, other: Any) -> bool:
    if not one.is_null().equals(other.is_null()):
        return False
    one, other = one.drop_null(), other.drop_null()
    if arrow("types").is_floating(one.type):
        return bool(one.to_numpy().tobytes() == other.to_numpy().tobytes())
    return bool(one.equals(other))


def _as_type(column: Any, type_: Any) -> Any:
    """A column of another type with the same values."""
    if arrow("types").is_dictionary(type_) and not arrow("types").is_dictionary(column.type):
        column = column.cast(type_.value_type).dictionary_encode()
    return column if column.type == type_ else column.cast(type_)
