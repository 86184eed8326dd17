"""Tables larger than memory, read in batches and cut into shards that other processes can read.

A :class:`Source` is a file, a directory or an address of fsspec's with Parquet, JSON Lines, CSV,
Arrow, numpy or text in it, or what is on every machine, such as the standard library. A shard is a
range of bytes or of row groups, or a whole file; together the shards have every row once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.core.errors import DataError
from shoal.corpora.files import Listing, find_files
from shoal.fields.data.readers import (
    COMPRESSED,
    FORMATS,
    NAMED,
    BadRowCount,
    BadRows,
    FilePiece,
    TableFormat,
    arrow,
    format_of,
)

ROWS = 65_536
"""Rows of a batch, at most."""

SHARD_BYTES = 64 * 2**20
"""Bytes of a shard, as stored, where a file can be cut."""


@dataclass(frozen=True)
class SourceShard:
    """Some rows of a source; it can be sent to another process.

    Args:
        form: format of the file.
        piece: its place in the file.
        fields: (column, type of Arrow) as the source has them, of the columns that are read.
        bad: what becomes of rows that cannot be read.
        number: place among the shards.
    """

    form: str
    piece: FilePiece
    fields: tuple[tuple[str, Any], ...]
    bad: BadRows
    number: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of the piece as stored; 0 where only reading tells."""
        known = _format(self.form).by_bytes and self.piece.end > 0
        return self.piece.end - self.piece.begin if known else 0

    def batches(self, rows: int = ROWS, *, bad: BadRowCount | None = None) -> Iterator[Any]:
        """Record batches of at most so many rows.

        Args:
            rows: of a batch.
            bad: counts what was passed over, where that is allowed.

        Raises:
            DataError: the file, or a row of it, cannot be read; names the place.
        """
        count = bad if bad is not None else BadRowCount()
        schema = arrow().schema(list(self.fields))
        for batch in _format(self.form).batches(self.piece, schema, _problem(self.bad, count)):
            for first in range(0, batch.num_rows, rows):
                yield batch.slice(first, rows)


@dataclass(frozen=True)
class Source:
    """Rows of a table, in the order of files and rows; never whole in memory.

    Args:
        where: a file, a directory, an address, or a name, such as ``stdlib``.
        columns: those that are read; None for all.
        pattern: of the names of files in a directory; ``*`` also matches ``/``.
        bad: what becomes of rows that cannot be read.
    """

    where: str
    columns: tuple[str, ...] | None = None
    pattern: str = "*"
    bad: BadRows = "raise"

    @property
    def _named(self) -> str | None:
        """Name of a table of this machine."""
        name, colon, _ = self.where.partition(":")
        return name if name in NAMED and (not colon or name == "photos") else None

    @cached_property
    def listing(self) -> Listing:
        """The files; none of the standard library.

        Raises:
            DataError: nothing is there.
        """
        if self._named is not None:
            return Listing(self.where, None, [], False)
        return find_files(self.where, self.pattern, option="data")

    @cached_property
    def form(self) -> str:
        """TableFormat of the files.

        Raises:
            DataError: they are of several.
        """
        if self._named is not None:
            return self._named
        forms = {format_of(file.name): file.name for file in self.listing.files}
        if len(forms) > 1:
            names = ", ".join(f"{name} ({form})" for form, name in sorted(forms.items()))
            raise DataError(
                f"data = {self.where!r}: files of several formats: {names}; choose one with a "
                "pattern, such as --set pattern='*.parquet'"
            )
        return next(iter(forms))

    @cached_property
    def schema(self) -> Any:
        """Schema of Arrow, of the columns that are read.

        Raises:
            DataError: a file cannot be read, or there is no such column.
        """
        schema = _format(self.form).schema(self.listing)
        if self.columns is None:
            return schema
        for name in self.columns:
            if name not in schema.names:
                raise DataError(
                    f"data = {self.where!r}: no column {name!r}; it has "
                    f"{', '.join(schema.names[:20])}"
                )
        return arrow().schema([schema.field(name) for name in self.columns])

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        named = _format(self.form).num_bytes
        return self.listing.num_bytes if named is None else named(self.listing)

    @property
    def compressed(self) -> bool:
        """Whether the first file is, by its name."""
        return any(file.name.endswith(COMPRESSED) for file in self.listing.files[:1])

    def count(self) -> int | None:
        """Rows; None where only reading would tell."""
        rows = _format(self.form).rows
        return None if rows is None else rows(self.listing)

    def shards(
        self, num_bytes: int = SHARD_BYTES, *, bad: BadRowCount | None = None
    ) -> list[SourceShard]:
        """Pieces that have every row once, in order.

        Args:
            num_bytes: of a shard, about; a file that cannot be cut is one.
            bad: counts files that cannot be opened, where that is allowed.

        Raises:
            DataError: a file cannot be opened.
        """
        fields = tuple((one.name, one.type) for one in self.schema)
        problem = _problem(self.bad, bad if bad is not None else BadRowCount())
        pieces = _format(self.form).pieces(self.listing, num_bytes, problem)
        return [
            SourceShard(self.form, piece, fields, self.bad, number)
            for number, piece in enumerate(pieces)
        ]

    def batches(self, rows: int = ROWS, *, bad: BadRowCount | None = None) -> Iterator[Any]:
        """All rows as record batches of at most so many.

        Raises:
            DataError: a file, or a row of it, cannot be read; names the place.
        """
        for shard in self.shards(bad=bad):
            yield from shard.batches(rows, bad=bad)


def open_source(
    where: str,
    *,
    columns: Sequence[str] | None = None,
    pattern: str = "*",
    bad: BadRows = "raise",
) -> Source:
    """A table of the user's, or of this machine.

    Args:
        where: a file or directory of ``.parquet``, ``.jsonl``, ``.csv``, ``.arrow``, ``.log`` (a
            row is a line: column ``text``) or other text (a row is a file: columns ``name`` and
            ``text``); any address that fsspec knows; or ``stdlib``, the standard library of this
            Python, ``digits`` of scikit-learn, ``photos:N``, descriptors of its photographs.
        columns: those that are read.
        pattern: of the names of files in a directory; ``*`` also matches ``/``.
        bad: ``skip`` counts rows that cannot be read instead of stopping at the first.

    Raises:
        DataError: nothing is there, it cannot be read, or there is no such column.
        MissingExtraError: pyarrow or fsspec is not installed.
    """
    source = Source(where, None if columns is None else tuple(columns), pattern, bad)
    _ = source.schema  # read now, so that what is wrong is said here
    return source


def _format(form: str) -> TableFormat:
    return NAMED[form] if form in NAMED else FORMATS[form]


def _problem(bad: BadRows, count: BadRowCount) -> Any:
    def problem(why: str, rows: int = 1) -> None:
        if bad == "raise":
            raise DataError(f"{why}; repair it, or pass over such rows with --set bad=skip")
        count.add(why, rows)

    return problem
