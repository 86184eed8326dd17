"""Parquet: one row a document, its text in one column."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.core.errors import DataError, MissingExtraError, require
from shoal.core.parts import part
from shoal.corpora.files import File, FileCorpus, Listing
from shoal.corpora.protocols import Document, Split, split_of

BATCH_ROWS = 1024


@part
class Parquet(FileCorpus):
    """One document per row; rows without text (null) are skipped.

    Held out: ``sha256(name) % heldout_every == 0``, where the name is the value of
    ``id_column``, or without one ``file#row`` with rows counted from 0.

    Args:
        column: the column that holds the text.
        id_column: a column whose value names the row, or empty.
    """

    column: str = "text"
    id_column: str = ""
    pattern: str = "*.parquet"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.column), "data.parquet.column", self.column, expected="a column's name")

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, in the order of files and rows.

        Raises:
            DataError: a file is not Parquet or has no such column; names the file.
            MissingExtraError: pyarrow is not installed.
        """
        listing = self._listing()
        for file in listing.files:
            where = listing.url(file)
            with opened(listing, file) as table:
                self._check(table.schema_arrow, where)
                yield from self._rows(table, file.name, where, split)

    def _check(self, schema: Any, where: str) -> None:
        import pyarrow as pa

        for option, column in (("column", self.column), ("id_column", self.id_column)):
            if column and column not in schema.names:
                raise DataError(
                    f"{where}: no column {column!r}; it has {', '.join(schema.names[:12])}; "
                    f"name the right one in data.{option}"
                )
        kind = schema.field(self.column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(
                f"{where}: column {self.column!r} holds {kind}, not text; "
                "name another in data.column"
            )

    def _rows(self, table: Any, name: str, where: str, split: Split | None) -> Iterator[Document]:
        columns = [self.column, *([self.id_column] if self.id_column else [])]
        for number, row in table_rows(table, columns, where):
            key = str(row[self.id_column]) if self.id_column else f"{name}#{number}"
            place = split_of(key, self.heldout_every)
            if row[self.column] is not None and split in (None, place):
                yield Document(key, row[self.column], place)


@contextlib.contextmanager
def opened(listing: Listing, file: File) -> Iterator[Any]:
    """A file of a listing as pyarrow reads it.

    Raises:
        DataError: it is no Parquet file, or a damaged one; names it.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("pyarrow", "run", "reading Parquet") from None
    with listing.open(file, decompress=False) as stream:
        try:
            yield pq.ParquetFile(stream)
        except (pa.ArrowException, OSError) as cause:
            raise DataError(
                f"{listing.url(file)}: not a readable Parquet file "
                f"({str(cause).partition(chr(10))[0]}); give a whole Parquet file, or name the "
                "right corpus: text, jsonl"
            ) from cause


def table_rows(
    table: Any, columns: Sequence[str], where: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of an open file, counted from 0, each by column.

    Raises:
        DataError: a text is not UTF-8; names file and row.
    """
    first = 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=list(columns)):
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            rows = []
            for at in range(batch.num_rows):
                try:
                    rows += batch.slice(at, 1).to_pylist()
                except UnicodeDecodeError as cause:
                    raise DataError(
                        f"{where}, row {first + at}: text that is not UTF-8 ({cause.reason}); "
                        "write the file again from text in UTF-8"
                    ) from cause
        yield from enumerate(rows, first)
        first += len(rows)
