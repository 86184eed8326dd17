"""Edge lists as text, such as SNAP's: an edge a line, with an optional weight."""

from __future__ import annotations

import gzip
import itertools
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.fields.graph.graph import CSRGraph, GraphError

# Bytes that are read at once.
_BLOCK = 1 << 25
_COMMENT = re.compile(rb"^[ ]*[#%][^\n]*\n?", re.MULTILINE)
_SPACES = re.compile(rb" {2,}")
_ID = re.compile(rb"[0-9]{1,19}")
_BLANKS = bytes.maketrans(b"\t,;\r", b"    ")


def read_edge_list(path: Path, *, directed: bool = False) -> CSRGraph:
    """Read ``source target [weight]`` lines.

    Fields are separated by blanks, tabs, commas or semicolons; lines that begin with ``#`` or
    ``%`` are comments. Ids are whole numbers from 0 to 2^63 - 1 and are numbered anew; the graph
    keeps them. A name that ends with .gz is decompressed.

    Args:
        path: of the file.
        directed: an edge leads from its source to its target only.

    Raises:
        DataError: the file cannot be read, or a line is none of an edge; names the line.
    """
    columns: list[list[np.ndarray]] = []
    try:
        with _opened(path) as file:
            for block in _blocks(file):
                columns.append(_parsed(block, len(columns[0]) if columns else 0))
    except (OSError, EOFError, zlib.error) as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    except _MalformedError:
        raise _first_malformed(path) from None
    if not columns:
        return CSRGraph.from_edges(np.zeros(0, np.int64), np.zeros(0, np.int64), directed=directed)
    whole = [np.concatenate(parts) for parts in zip(*columns, strict=True)]
    try:
        return CSRGraph.from_edges(*whole, directed=directed)
    except GraphError:
        raise _first_malformed(path) from None


class _MalformedError(Exception):
    """A block has a line that is none of an edge."""


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Whole lines, some megabytes at once, without comments, with single blanks."""
    rest = b""
    while True:
        block = file.read(_BLOCK)
        end = block.rfind(b"\n") + 1
        if block and not end:
            rest += block
            if len(rest) > _BLOCK:
                raise _MalformedError
            continue
        lines, rest = rest + block[:end], block[end:]
        if not block:
            lines, rest = lines + rest, b""
        lines = lines.translate(_BLANKS)
        if b"#" in lines or b"%" in lines:
            lines = _COMMENT.sub(b"", lines)
        if b"  " in lines:
            lines = _SPACES.sub(b" ", lines)
        lines = lines.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" \n")
        if lines:
            yield lines
        if not block:
            return


def _parsed(lines: bytes, columns: int) -> list[np.ndarray]:
    """Source, target and, if they have one, weight of some lines.

    Args:
        lines: whole lines.
        columns: of the blocks before; 0 for the first.
    """
    arrow: Any = import_extra("pyarrow", extra="fields", purpose="reading edge lists")
    csv: Any = import_extra("pyarrow.csv", extra="fields", purpose="reading edge lists")
    columns = columns or len(lines.split(b"\n", 1)[0].split())
    if columns not in (2, 3):
        raise _MalformedError
    names = ["source", "target", "weight"][:columns]
    kinds = dict(zip(names, (arrow.int64(), arrow.int64(), arrow.float32()), strict=False))
    try:
        table = csv.read_csv(
            arrow.py_buffer(lines),
            read_options=csv.ReadOptions(column_names=names, block_size=1 << 22),
            parse_options=csv.ParseOptions(delimiter=" ", quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types=kinds, null_values=[], strings_can_be_null=False
            ),
        )
    except arrow.ArrowInvalid:
        raise _MalformedError from None
    return [column.to_numpy() for column in table.columns]


def _first_malformed(path: Path) -> DataError:
    """The error about the first line that is none of an edge, by its number in the file."""
    columns = 0
    with _opened(path) as file:
        for number, line in zip(itertools.count(1), file, strict=False):
            fields = line.translate(_BLANKS).split()
            if not fields or fields[0][:1] in b"#%":
                continue
            columns = columns or (len(fields) if len(fields) in (2, 3) else 2)
            expected = "source target weight" if columns == 3 else "source target"
            if len(fields) != columns or not _edge(fields):
                shown = line.strip()[:60].decode("utf-8", "replace")
                return DataError(
                    f"{path}: line {number}: {shown!r}; expected {expected}: ids from 0 to "
                    "2^63 - 1, and finite weights"
                )
    return DataError(f"{path}: not an edge list")


def _edge(fields: list[bytes]) -> bool:
    try:
        weight = float(fields[2]) if len(fields) == 3 else 0.0
    except ValueError:
        return False
    ids = all(_ID.fullmatch(field) and int(field) < 2**63 for field in fields[:2])
    return ids and math.isfinite(weight)
