"""Reading baskets: a column of lists, lines of text, the package index, or the generator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.core.counts import count
from shoal.core.errors import DataError
from shoal.corpora.debian import debian_packages
from shoal.corpora.files import find_files
from shoal.fields.data.mine.baskets import Baskets, from_arrow
from shoal.fields.data.mine.generator import heaton_baskets
from shoal.fields.data.mine.job import MineJob
from shoal.fields.data.mine.protocols import MineError
from shoal.fields.data.readers import FORMATS, BadRowCount, arrow, format_of
from shoal.fields.data.sources import SHARD_BYTES, SourceShard, open_source

_GENERATED, _PACKAGES = "baskets", "debian"


@dataclass(frozen=True)
class BasketShard:
    """Some of the baskets; it can be sent to another process.

    Args:
        source: rows of a table or of text; None for all baskets of a source that has no files.
        column: that has the lists; empty for text.
        separator: between items of text.
        data: the job's.
    """

    source: SourceShard | None
    column: str
    separator: str | None
    data: str

    def lists(self, bad: BadRowCount) -> Iterator[Any]:
        """List arrays of Arrow, a row for each basket."""
        if self.source is None:
            yield _made(self.data)
            return
        for batch in self.source.batches(bad=bad):
            if self.column:
                yield batch.column(self.column)
            else:
                yield self._split(batch.column("text"))

    def _split(self, text: Any) -> Any:
        compute = arrow("compute")
        if self.separator is None:
            trimmed = compute.utf8_trim_whitespace(text)
            parts = compute.utf8_split_whitespace(trimmed)
        else:
            parts = compute.split_pattern(text, self.separator)
        # Of an empty line a list with one empty text is made.
        empty = compute.equal(text if self.separator else trimmed, "")
        return compute.if_else(empty, arrow().scalar([], parts.type), parts)

    def baskets(self, bad: BadRowCount | None = None) -> Baskets:
        """All of them in memory.

        Raises:
            DataError: a row cannot be read.
            MineError: the column has no lists.
        """
        if self.source is None:
            return _generated(self.data) or from_arrow(_made(self.data))
        return together([self], bad)


def together(shards: list[BasketShard], bad: BadRowCount | None = None) -> Baskets:
    """The baskets of several shards."""
    count = bad if bad is not None else BadRowCount()
    if len(shards) == 1 and shards[0].source is None:
        return shards[0].baskets()
    pieces = [piece for shard in shards for piece in shard.lists(count)]
    if not pieces:
        raise DataError(f"data = {shards[0].data!r}: no baskets" if shards else "no baskets")
    return from_arrow(arrow().chunked_array(pieces))


def shards_of(job: MineJob, bad: BadRowCount | None = None) -> list[BasketShard]:
    """The baskets of a job in pieces, each once.

    Raises:
        DataError: nothing is there, or it cannot be read.
        MineError: there is no column of lists.
    """
    if job.data.partition(":")[0] in (_GENERATED, _PACKAGES):
        return [BasketShard(None, "", None, job.data)]
    listing = find_files(job.data, "*", option="data")
    if format_of(listing.files[0].name) in ("documents", "lines"):
        if not listing.single:
            raise DataError(f"data = {job.data!r}: a directory of text; give one file")
        fields = (("text", arrow().large_string()),)
        count = bad if bad is not None else BadRowCount()
        pieces = FORMATS["lines"].pieces(listing, SHARD_BYTES, lambda why, rows=1: count.add(why))
        return [
            BasketShard(
                SourceShard("lines", piece, fields, job.bad, number), "", job.separator, job.data
            )
            for number, piece in enumerate(pieces)
        ]
    source = open_source(job.data, bad=job.bad)
    column = _column(source.schema, job)
    source = open_source(job.data, columns=[column], bad=job.bad)
    return [
        BasketShard(shard, column, None, job.data) for shard in source.shards(SHARD_BYTES, bad=bad)
    ]


def num_bytes_of(job: MineJob) -> int:
    """Bytes of the data as stored; 0 of what is made."""
    if job.data.partition(":")[0] in (_GENERATED, _PACKAGES):
        return 0
    return find_files(job.data, "*", option="data").num_bytes


def _column(schema: Any, job: MineJob) -> str:
    types = arrow().types
    lists: list[str] = [
        field.name
        for field in schema
        if types.is_list(field.type)
        or types.is_large_list(field.type)
        or types.is_fixed_size_list(field.type)
    ]
    if job.column is not None:
        if job.column not in schema.names:
            raise MineError(
                f"column = {job.column!r}: {job.data} has {', '.join(schema.names[:20])}"
            )
        if job.column not in lists:
            raise MineError(
                f"column = {job.column!r}: has {schema.field(job.column).type}, not lists"
            )
        return job.column
    if len(lists) != 1:
        raise MineError(
            f"data = {job.data!r}: {'no column' if not lists else 'several columns'} of lists"
            + (f" ({', '.join(lists)}); name one with --set column=NAME" if lists else "")
            + ("" if lists else f" among {', '.join(schema.names[:20])}")
        )
    return lists[0]


def _generated(data: str) -> Baskets | None:
    name, _, text = data.partition(":")
    if name != _GENERATED:
        return None
    parts = text.split(":") if text else []
    try:
        size, planted = (parts[1:] + ["10", "0.5"][len(parts[1:]) :])[:2]
        return heaton_baskets(count(parts[0], "data = baskets:N"), int(size), float(planted))
    except (IndexError, ValueError) as cause:
        raise MineError(
            f"data = {data!r}: expected baskets:N[:SIZE[:P]], such as baskets:50000:20:0.5"
        ) from cause


def _made(data: str) -> Any:
    """A list array of what has no files."""
    generated = _generated(data)
    if generated is not None:
        return generated.to_arrow()
    packages = debian_packages()
    return arrow().array([list(row.depends) for row in packages.rows])
