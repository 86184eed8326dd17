"""Lengths of sequences from a file: text, JSON or Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.extras import import_extra

# A step has fewer sequences than that.
_MOST = 10_000_000


def read_lengths(path: Path, column: str = "length") -> list[int]:
    """Tokens of each sequence.

    Args:
        path: whole numbers between spaces, or a JSON list of them, alone or below ``column``, or a
            Parquet file with a column of them.
        column: key or column.

    Raises:
        DataError: the file cannot be read as such, or says something else; names file and value.
        MissingExtraError: pyarrow is not installed.
    """
    try:
        if path.suffix == ".parquet":
            lengths = _parquet(path, column)
        elif path.suffix == ".json":
            lengths = json.loads(path.read_text())
            if isinstance(lengths, dict):
                lengths = lengths.get(column)
        else:
            lengths = [int(word) for word in path.read_text().split()]
    except (OSError, ValueError) as cause:
        raise DataError(
            f"{path}: no file of lengths ({str(cause).splitlines()[0]}); give whole numbers as "
            "text, as a JSON list or in a Parquet column"
        ) from cause
    if not isinstance(lengths, list) or not 0 < len(lengths) <= _MOST:
        raise DataError(
            f"{path}: expected 1 to {_MOST:,} lengths, as a list or below {column!r}; name the "
            "column with --column"
        )
    for number, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise DataError(
                f"{path}: sequence {number} has length {length!r}: expected a whole number of "
                "tokens, at least 1"
            )
    return lengths


def _parquet(path: Path, column: str) -> Any:
    parquet = import_extra("pyarrow.parquet", extra="run", purpose="reading Parquet")
    names = parquet.read_schema(path).names
    if column not in names:
        raise DataError(
            f"{path}: no column {column!r}: expected one of {', '.join(names)}; name it with "
            "--column"
        )
    return parquet.read_table(path, columns=[column]).column(column).to_pylist()
