"""Parquet: one row a document, its text in one column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.core.errors import DataError, MissingExtraError, require
from shoal.core.parts import part
from shoal.corpora.files import FileCorpus
from shoal.corpora.protocols import Document, Split, split_of

__all__ = ["Parquet"]

BATCH_ROWS = 1024


@part
class Parquet(FileCorpus):
    """A document a row; rows without text (null) are passed over.

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
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise MissingExtraError("pyarrow", "run", "reading Parquet") from None
        listing = self._listing()
        for file in listing.files:
            where = listing.url(file)
            with listing.open(file, decompress=False) as stream:
                try:
                    table = pq.ParquetFile(stream)
                    self._check(table.schema_arrow, where, pa)
                    yield from self._rows(table, file.name, split)
                except (pa.ArrowException, OSError, UnicodeDecodeError) as cause:
                    raise DataError(
                        f"{where}: not a readable Parquet file ({str(cause).partition(chr(10))[0]})"
                        "; give a whole Parquet file, or name the right corpus: text, jsonl"
                    ) from cause

    def _check(self, schema: Any, where: str, pa: Any) -> None:
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

    def _rows(self, table: Any, name: str, split: Split | None) -> Iterator[Document]:
        columns = [self.column, *([self.id_column] if self.id_column else [])]
        row = 0
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
            texts = batch.column(self.column).to_pylist()
            keys = batch.column(self.id_column).to_pylist() if self.id_column else None
            for position, text in enumerate(texts):
                key = str(keys[position]) if keys else f"{name}#{row + position}"
                place = split_of(key, self.heldout_every)
                if text is not None and split in (None, place):
                    yield Document(key, text, place)
            row += len(texts)
