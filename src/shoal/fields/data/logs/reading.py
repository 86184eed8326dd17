"""Reading a log in blocks of whole lines: header, content, and the content under masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.corpora.files import Listing, find_files
from shoal.fields.data.logs.formats import LogFormat, recognized
from shoal.fields.data.logs.native import (
    Bools,
    SplitLines,
    contents,
    gather,
    header_fields,
    split_lines,
)
from shoal.fields.data.logs.protocols import Longs
from shoal.fields.data.readers import BadRowCount, FilePiece, arrow, line_blocks, opened

_HEAD = 1 << 18
# Of a file beside which the truth of Loghub lies.
_TRUTH = "_structured.csv", "_templates.csv", "anomaly_label.csv"
# A compressed log is about so many times larger.
_EXPANDED = 12.0
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class LogBlock(NamedTuple):
    """Some lines of a log.

    Args:
        text: the bytes.
        lines: where its lines are.
        spans: int64 [n, fields, 2] in the text, the content last; -1 where a field is absent.
        ok: which lines have the header.
    """

    text: bytes
    lines: SplitLines
    spans: Longs
    ok: Bools

    def field(self, place: int) -> Any:
        """Arrow array of large_binary: a field of all lines."""
        return gather(self.text, self.spans[:, place])


@dataclass(frozen=True)
class LogFiles:
    """The files of a log.

    Args:
        where: a file, a directory or an address; ``.gz``, ``.bz2``, ``.xz`` are decompressed.
        pattern: of the names of files in a directory.
        bad: counts lines that are too long to be read; None refuses them.
    """

    where: str
    pattern: str = "*"
    bad: BadRowCount | None = None

    @cached_property
    def listing(self) -> Listing:
        """The files, without those that hold the truth about them.

        Raises:
            DataError: nothing is there.
        """
        listing = find_files(self.where, self.pattern, option="data")
        logs = [
            file
            for file in listing.files
            if listing.single or not file.name.endswith((*_TRUTH, "LICENSE"))
        ]
        if not logs:
            raise DataError(f"data = {self.where!r}: no log among {len(listing.files)} files")
        return listing.only(logs)

    @cached_property
    def head(self) -> bytes:
        """The first lines of the first file that has some.

        Raises:
            DataError: it is no text.
        """
        with opened(FilePiece(self.listing.url(self.listing.files[0]))) as stream:
            text: bytes = stream.read(_HEAD)
        _check_text(text, self.where)
        return text[: text.rfind(b"\n") + 1] or text

    @property
    def num_bytes(self) -> float:
        """Bytes of text; of what is compressed, about."""
        return float(
            sum(
                file.num_bytes * (_EXPANDED if file.name.endswith(_COMPRESSED) else 1.0)
                for file in self.listing.files
            )
        )

    def recognized(self) -> LogFormat:
        """The format that its first lines have."""
        return recognized(self.head.split(b"\n"))

    def texts(self) -> Iterator[bytes]:
        """Blocks of whole lines, some MB each.

        Raises:
            DataError: a file cannot be read, or is no text.
        """
        for file in self.listing.files:
            url = self.listing.url(file)
            first = True
            for _, text in line_blocks(FilePiece(url), self._problem):
                if first:
                    _check_text(text[:_HEAD], url)
                first = False
                yield text

    def blocks(self, form: LogFormat) -> Iterator[LogBlock]:
        """The same, with the fields of headers."""
        for text in self.texts():
            yield block_of(text, form)

    def _problem(self, why: str, rows: int = 1) -> None:
        if self.bad is None:
            raise DataError(f"{why}; cut it, or pass over such lines with --set bad=skip")
        self.bad.add(why, rows)


def block_of(text: bytes, form: LogFormat) -> LogBlock:
    """Lines and fields of a block of text."""
    lines = split_lines(text)
    spans, ok = header_fields(text, lines, form.program, flexible=True)
    return LogBlock(text, lines, spans, ok)


def masked(column: Any, masks: Sequence[str]) -> Any:
    """Contents with each match of each mask replaced by ``<*>``; an Arrow array of large_binary."""
    compute = arrow("compute")
    for mask in masks:
        column = compute.replace_substring_regex(column, mask, "<*>")
    return column


def as_text(column: Any) -> Any:
    """An Arrow array of large_binary as large_string; what is no UTF-8 becomes U+FFFD."""
    pa = arrow()
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array(
            [one.decode("utf-8", "replace") for one in column.to_pylist()], pa.large_string()
        )


def binary_column(lines: Sequence[bytes | str]) -> Any:
    """Lines as an Arrow array of large_binary.

    Raises:
        DataError: one is neither text nor bytes.
    """
    pa = arrow()
    encoded = []
    for at, line in enumerate(lines):
        if not isinstance(line, bytes | str):
            raise DataError(f"line {at}: {type(line).__name__}, expected text or bytes")
        encoded.append(line.encode("utf-8", "surrogateescape") if isinstance(line, str) else line)
    return pa.array(encoded, pa.large_binary())


def lengths(column: Any) -> Longs:
    """Int64 [n]: bytes of each item of an Arrow array of large_binary."""
    _, offsets = contents(column)
    return np.diff(offsets)


def _check_text(text: bytes, where: str) -> None:
    if b"\0" in text:
        kind = "UTF-16" if text[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary"
        raise DataError(
            f"{where}: {kind}, not a log: it has zero bytes; give text of one byte a sign or "
            "UTF-8, plain or compressed (.gz, .bz2, .xz)"
        )
