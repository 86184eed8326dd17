"""Questions to DuckDB about the rows of Parquet files.

Rows are equal where every column is the same in a rebuilt table: NULL equals NULL, NaN equals NaN,
and -0.0 is not 0.0.
"""

# ruff: noqa: S608 - names and paths are quoted here; nothing else comes from files.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.fields.data.lake.footers import RowSemantics
from shoal.fields.data.lake.tables import Lake, LakeTable


class LakeQueries:
    """A connection to DuckDB, and the bytes that its questions had to read.

    Args:
        lake: the tables.
        threads: of DuckDB.

    Attributes:
        bytes_read: sizes, as stored, of the columns that were asked for.
    """

    def __init__(self, lake: Lake, *, threads: int = 1) -> None:
        duckdb: Any = import_extra("duckdb", extra="fields", purpose="comparing tables")
        self.lake, self.bytes_read = lake, 0
        self._error = duckdb.Error
        self._database = duckdb.connect(":memory:", config={"threads": threads})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def ask(self, text: str) -> list[tuple[Any, ...]]:
        """Rows of an answer.

        Raises:
            DataError: a file cannot be read.
        """
        try:
            answer: list[tuple[Any, ...]] = self._database.execute(text).fetchall()
        except self._error as cause:
            reason = str(cause).partition("\n")[0]
            raise DataError(f"a table cannot be compared ({reason})") from cause
        return answer

    def missing(self, parent: LakeTable, child: LakeTable, semantics: RowSemantics) -> bool:
        """Whether a row of the child does not occur in the parent; reads both."""
        names = sorted(child.columns)
        self.bytes_read += child.bytes_of(names) + parent.bytes_of(names)
        every = "ALL" if semantics == "bag" else ""
        # Rows are compared by hash and then by value.
        difference = (
            f"{self.rows(child, names, exact=True)} EXCEPT {every} "
            f"{self.rows(parent, names, exact=True)}"
        )
        return bool(self.ask(f"SELECT 1 FROM ({difference}) LIMIT 1"))

    def row_ids(self, parent: LakeTable, child: LakeTable) -> list[int]:
        """For each row of the child, in order, the first row of the parent that equals it.

        Raises:
            DataError: a row has none.
        """
        names = sorted(child.columns)
        self.bytes_read += child.bytes_of(names) + parent.bytes_of(names)
        keys = self.keys(child, names, exact=True)
        same = " AND ".join(f"c.{k} IS NOT DISTINCT FROM p.{k}" for k, _ in keys)
        by = ", ".join(k for k, _ in keys)
        rows = self.ask(
            f"SELECT c.row, p.row FROM ({self.rows(child, names, exact=True, row=True)}) c "
            f"JOIN (SELECT min(row) AS row, {by} FROM "
            f"({self.rows(parent, names, exact=True, row=True)}) GROUP BY {by}) p "
            f"ON {same} ORDER BY c.row"
        )
        if [row for row, _ in rows] != list(range(child.rows)):
            raise DataError(
                f"{child.name}: {child.rows - len(rows)} rows do not occur in {parent.name}"
            )
        return [int(row) for _, row in rows]

    def rows(
        self,
        table: LakeTable,
        names: Iterable[str],
        *,
        exact: bool = False,
        row: bool = False,
        where: str = "",
    ) -> str:
        """A query for some columns, as ``k0``, ``k1`` ...

        Args:
            table: the file.
            names: normalized names.
            exact: tell -0.0 from 0.0, by a further column for each of floats.
            row: add ``row``, the number of the row.
            where: a condition.
        """
        keys = ", ".join(f"{text} AS {k}" for k, text in self.keys(table, names, exact=exact))
        number = "file_row_number AS row, " if row else ""
        option = ", file_row_number = true" if row or "file_row_number" in where else ""
        path = table.path.replace("'", "''")
        condition = f" WHERE {where}" if where else ""
        return f"SELECT {number}{keys} FROM read_parquet('{path}'{option}){condition}"

    def keys(
        self, table: LakeTable, names: Iterable[str], *, exact: bool = False
    ) -> list[tuple[str, str]]:
        """(Name in the answer, expression) of what is compared of some columns."""
        keys = []
        for at, name in enumerate(names):
            column = table.columns[name]
            quoted = '"' + column.name.replace('"', '""') + '"'
            type_ = self.lake.compared_as[name, column.kind]
            keys.append((f"k{at}", f"CAST({quoted} AS {type_})" if type_ else quoted))
            if exact and column.kind == "float":
                keys.append((f"z{at}", f"CASE WHEN {quoted} = 0 THEN signbit({quoted}) END"))
        return keys


def listed(numbers: Sequence[int]) -> str:
    """Numbers as a list of SQL."""
    return "(" + ", ".join(map(str, numbers)) + ")"
