"""Rows on their way through the steps: columns of Arrow, the place of each row, and its side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shoal.core.counts import count
from shoal.fields.data.prepare.counting import mixed
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.generator import DirtyShard, dirty_batch, dirty_shards
from shoal.fields.data.readers import BadRowCount, BadRows, arrow
from shoal.fields.data.sources import SHARD_BYTES, Source, SourceShard, open_source

# Rows of a shard, at most; so that the place of a row in all data is one number.
_PLACES = 2**40
# Numbers whose squares can still be added up; those beyond are as good as infinite.
_MOST = 1e150
# Shards of large data.
_MOST_SHARDS = 1024


@dataclass(frozen=True)
class PrepBatch:
    """Some rows, all of them for fitting or all held out.

    Args:
        columns: name -> array of Arrow, as long as ``places``. Numbers are float64, text is
            ``large_string``, anything else is as it was.
        places: int64, where each row is in the data; folds and samples follow from it.
        target: column that is to be predicted; empty for none.
        training: whether steps may learn from these rows.
    """

    columns: Mapping[str, Any]
    places: np.ndarray
    target: str = ""
    training: bool = True

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.places)

    def changed(self, columns: Mapping[str, Any]) -> PrepBatch:
        """With other columns in the place of those of that name."""
        return replace(self, columns={**self.columns, **columns})

    def added(self, columns: Mapping[str, Any], drop: Sequence[str] = ()) -> PrepBatch:
        """With new columns behind the others, and without some.

        Raises:
            PrepareError: there is a column of that name.
        """
        kept = {name: one for name, one in self.columns.items() if name not in drop}
        twice = [name for name in columns if name in kept]
        if twice:
            raise PrepareError(f"steps: there is a column {twice[0]!r} already; rename it")
        return replace(self, columns={**kept, **columns})

    def where(self, mask: np.ndarray) -> PrepBatch:
        """The rows of a mask."""
        if mask.all():
            return self
        pa = arrow()
        chosen = pa.Array.from_buffers(pa.bool_(), len(mask), [None, _bits(mask)])
        columns = {name: one.filter(chosen) for name, one in self.columns.items()}
        return replace(self, columns=columns, places=self.places[mask])

    def kind(self, name: str) -> str:
        """``number``, ``text`` or ``other``."""
        types = arrow("types")
        kind = self.columns[name].type
        if types.is_floating(kind):
            return "number"
        return "text" if types.is_large_string(kind) else "other"

    def chosen(self, names: Sequence[str], kind: str, where: str) -> list[str]:
        """Columns that a step works on: those that are named, or all of a kind but the target.

        Raises:
            PrepareError: a column is missing, or of another kind.
        """
        for name in names:
            if name not in self.columns:
                raise PrepareError(
                    f"{where}.columns: no column {name!r} at this step; there are "
                    f"{', '.join(list(self.columns)[:20])}"
                )
            if kind and self.kind(name) != kind:
                raise PrepareError(
                    f"{where}.columns: {name!r} is {self.columns[name].type}, not {kind}; convert "
                    "it with the step `types` before"
                )
        if names:
            return list(names)
        return [n for n in self.columns if n != self.target and self.kind(n) in (kind or "number")]

    def numbers(self, name: str) -> np.ndarray:
        """A column of numbers, float64; NaN where it is missing."""
        values: np.ndarray = self.columns[name].to_numpy(zero_copy_only=False)
        return values

    def there(self, name: str) -> np.ndarray:
        """Of a column of numbers those that are not missing."""
        values = self.numbers(name)
        return np.asarray(values[~np.isnan(values)])

    def matrix(self, names: Sequence[str], where: str) -> np.ndarray:
        """Several columns of numbers side by side [rows, columns].

        Raises:
            PrepareError: a value is missing.
        """
        values = np.column_stack([self.numbers(name) for name in names])
        if np.isnan(values).any():
            name = names[int(np.isnan(values).any(axis=0).argmax())]
            raise PrepareError(f"{where}: column {name!r} has missing values; use `impute` before")
        return values

    def to_arrow(self) -> Any:
        """A record batch of Arrow; what is missing is null."""
        pa = arrow()
        arrays = [
            _with_nulls(self.numbers(name)) if self.kind(name) == "number" else one
            for name, one in self.columns.items()
        ]
        return pa.record_batch(arrays, list(self.columns))


def column_of(values: np.ndarray) -> Any:
    """A column of numbers of an array."""
    pa, whole = arrow(), np.ascontiguousarray(values, np.float64)
    # Of buffers, so that nothing is copied.
    return pa.Array.from_buffers(pa.float64(), len(whole), [None, pa.py_buffer(whole)])


def _with_nulls(values: np.ndarray) -> Any:
    """A column of numbers in which NaN is null."""
    pa, whole = arrow(), np.ascontiguousarray(values)
    buffers = [_bits(~np.isnan(whole)), pa.py_buffer(whole)]
    return pa.Array.from_buffers(pa.float64(), len(whole), buffers)


def _bits(mask: np.ndarray) -> Any:
    return arrow().py_buffer(np.packbits(mask, bitorder="little"))


def _unified(column: Any) -> Any:
    """Numbers as float64 with NaN for what is missing or infinite, text as large_string."""
    pa, types = arrow(), arrow("types")
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    kind = column.type
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_decimal(kind):
        column = column.cast(pa.float64(), safe=False)
    elif types.is_temporal(kind) and not (types.is_duration(kind) or types.is_time(kind)):
        days = column.cast(pa.timestamp("ms")).cast(pa.int64()).cast(pa.float64(), safe=False)
        return _unified(arrow("compute").divide(days, 86_400_000.0))
    if types.is_floating(column.type):
        values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        finite = np.abs(values) < _MOST
        return column_of(values if finite.all() else np.where(finite, values, np.nan))
    if types.is_string(kind) or types.is_null(kind):
        return column.cast(pa.large_string())
    return column


def batch_of(rows: Any, places: np.ndarray, target: str = "", training: bool = True) -> PrepBatch:
    """Rows of a record batch or table of Arrow.

    Raises:
        PrepareError: two columns have one name, or a name has a control character.
    """
    for name in rows.schema.names:
        if rows.schema.names.count(name) > 1 or not name.isprintable():
            raise PrepareError(f"column {name!r}: a name that is not printable, or is there twice")
    columns = {name: _unified(rows.column(name)) for name in rows.schema.names}
    return PrepBatch(columns, places, target, training)


@dataclass(frozen=True)
class PrepShard:
    """Some rows of the data; it can be sent to another process.

    Args:
        source: where they are; generated rows have the same interface.
        target: as of :class:`PrepBatch`.
        holdout: share of the rows that no step learns from.
        rows: of a batch, at most.
        seed: of the choice of held-out rows.
    """

    source: SourceShard | DirtyShard
    target: str
    holdout: float
    rows: int
    seed: int

    def batches(
        self, *, held_out: bool = False, bad: BadRowCount | None = None
    ) -> Iterator[PrepBatch]:
        """The training rows; with ``held_out`` the others too, in batches of their own.

        Raises:
            DataError: a row cannot be read.
        """
        begin = self.source.number * _PLACES
        for rows in self.source.batches(self.rows, bad=bad):
            places = np.arange(begin, begin + rows.num_rows, dtype=np.int64)
            begin += rows.num_rows
            batch = batch_of(rows, places, self.target)
            out = mixed(places, self.seed) < np.uint64(self.holdout * 2.0**63) * np.uint64(2)
            yield batch.where(~out)
            if held_out and out.any():
                yield replace(batch.where(out), training=False)

    def nothing(self) -> PrepBatch:
        """No rows, with the columns that there would be."""
        schema = arrow().schema(list(self.source.fields))
        return batch_of(schema.empty_table(), np.empty(0, np.int64), self.target)


@dataclass(frozen=True)
class PrepTable:
    """A table of the user's, or a generated one.

    Args:
        data: ``dirty:N``, or anything that :func:`~shoal.fields.data.sources.open_source` opens.
        target: column that is to be predicted; empty for none.
        holdout: share of the rows that no step learns from.
        rows: of a batch.
        seed: of held-out rows, and of generated ones.
        bad: what becomes of rows that cannot be read.

    Raises:
        DataError: it cannot be read.
        PrepareError: it has no such target.
    """

    data: str
    target: str = ""
    holdout: float = 0.0
    rows: int = 65_536
    seed: int = 1
    bad: BadRows = "raise"

    def __post_init__(self) -> None:
        if self.target and self.target not in self.schema.names:
            raise PrepareError(
                f"target = {self.target!r}: no such column; {self.data} has "
                f"{', '.join(self.schema.names[:20])}"
            )
        if self.target and self.nothing().kind(self.target) == "other":
            raise PrepareError(
                f"target = {self.target!r}: is {self.schema.field(self.target).type}; expected "
                "numbers or text"
            )

    @cached_property
    def _generated(self) -> int | None:
        name, _, number = self.data.partition(":")
        return count(number, "data = dirty:N") if name == "dirty" else None

    @cached_property
    def _source(self) -> Source:
        return open_source(self.data, bad=self.bad)

    @cached_property
    def schema(self) -> Any:
        """Schema of Arrow."""
        return self._source.schema if self._generated is None else dirty_batch(1, 0, 0).schema

    def nothing(self) -> PrepBatch:
        """No rows, with all columns."""
        return batch_of(self.schema.empty_table(), np.empty(0, np.int64), self.target)

    @property
    def num_bytes(self) -> int:
        """Bytes as stored; about, of what is generated."""
        return self._source.num_bytes if self._generated is None else 100 * self._generated

    def shards(self, bad: BadRowCount) -> list[PrepShard]:
        """Pieces that have every row once."""
        pieces: Sequence[SourceShard | DirtyShard]
        if self._generated is not None:
            pieces = dirty_shards(self._generated, self.seed)
        else:
            # So few that what all of them know has room.
            size = max(SHARD_BYTES, self.num_bytes // _MOST_SHARDS)
            pieces = self._source.shards(size, bad=bad)
        return [PrepShard(one, self.target, self.holdout, self.rows, self.seed) for one in pieces]
