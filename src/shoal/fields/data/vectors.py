"""Vectors in files and tables: which columns make one up, and their numbers as an array."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.errors import DataError
from shoal.corpora.files import find_files
from shoal.fields.data.readers import arrow, npy_shape, readable

if TYPE_CHECKING:
    from shoal.fields.data.sources import Source

_ENDINGS = (".npy", ".parquet", ".csv", ".jsonl", ".ndjson")


def vector_columns(schema: Any, columns: Sequence[str], where: str) -> list[str]:
    """The columns that make up a vector: one of lists, or some of numbers.

    Args:
        schema: of Arrow.
        columns: those that the user named; empty for a column of lists, or else all of numbers.
        where: the data, for errors.

    Raises:
        DataError: there is no such column, or none of numbers, or several of lists.
    """
    known = {name: schema.field(name).type for name in schema.names}
    for name in columns:
        if name not in known:
            raise DataError(
                f"{where}: columns: there is no {name!r}; it has {', '.join([*known][:20])}"
            )
        if not (is_number(known[name]) or is_list(known[name])):
            raise DataError(f"{where}: columns: {name!r} holds {known[name]}, not numbers")
    chosen = list(columns) or [name for name, kind in known.items() if is_list(kind)]
    chosen = chosen or [name for name, kind in known.items() if is_number(kind)]
    if not chosen:
        raise DataError(f"{where}: no column of numbers among {', '.join([*known][:20])}")
    if len(chosen) > 1 and any(is_list(known[name]) for name in chosen):
        raise DataError(
            f"{where}: several columns with lists: {', '.join(chosen)}; name one in columns"
        )
    return chosen


def dim_of(source: Source, columns: Sequence[str]) -> int:
    """Numbers of the vector that a row is; 0 for text, and for a table without rows.

    Args:
        source: the table; its first row is read where the schema does not say.
        columns: those that the user named; empty for a column of lists, or else, unless there is
            ``text``, all of numbers but ``label``.

    Raises:
        DataError: the table cannot be read.
    """
    schema = source.schema
    names = [name for name in columns or schema.names if name in schema.names and name != "label"]
    lists = [name for name in names if is_list(schema.field(name).type)]
    if not lists:
        text = not columns and "text" in names
        return 0 if text else sum(is_number(schema.field(name).type) for name in names)
    known = getattr(schema.field(lists[0]).type, "list_size", None)
    if known is not None:
        return int(known)
    first = next((batch for batch in source.batches(1) if batch.num_rows), None)
    return len(first.column(lists[0])[0].as_py() or ()) if first is not None else 0


def matrix_of(table: Any, chosen: Sequence[str], where: str) -> np.ndarray:
    """Float64 [n, d]: the numbers of those columns of a table or a batch.

    Raises:
        DataError: lists have different lengths.
    """
    if not is_list(table.schema.field(chosen[0]).type):
        columns = [
            table.column(name).to_numpy(zero_copy_only=False).astype(np.float64) for name in chosen
        ]
        return np.stack(columns, axis=1)
    column = table.column(chosen[0])
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    lengths = set(arrow("compute").list_value_length(column).unique().to_pylist())
    if len(column) and (len(lengths) != 1 or None in lengths):
        raise DataError(
            f"{where}: column {chosen[0]!r}: lists of different lengths "
            f"({', '.join(sorted(map(str, lengths))[:5])}); every object needs as many numbers"
        )
    flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    width = lengths.pop() if lengths else 0
    return flat.astype(np.float64).reshape(len(column), width)


class VectorShape(NamedTuple):
    """How much there is, before it is read.

    Args:
        n: rows.
        dim: numbers of a row.
        note: which columns were taken; empty where there is no choice.
    """

    n: int
    dim: int
    note: str


def vector_shape(where: str, columns: tuple[str, ...] = ()) -> VectorShape:
    """Rows and columns of a file; .npy and .parquet say so in their first bytes.

    Args:
        where: the file, ending with .npy, .parquet, .csv or .jsonl.
        columns: those that make up a vector; empty for the one of lists, or all of numbers.

    Raises:
        DataError: the file cannot be read, or holds no numbers.
    """
    kind, listing = _listing(where)
    if kind == ".npy":
        with listing.open(listing.files[0]) as stream:
            rows, width, _ = npy_shape(stream, where)
        return VectorShape(rows, width, "")
    if kind == ".parquet":
        with listing.open(listing.files[0], decompress=False) as stream, readable(where):
            file = arrow("parquet").ParquetFile(stream)
            chosen = vector_columns(file.schema_arrow, columns, where)
            rows = file.metadata.num_rows
            lists = len(chosen) == 1 and is_list(file.schema_arrow.field(chosen[0]).type)
            dim = len(chosen)
            if lists and rows:
                first = next(file.iter_batches(batch_size=1, columns=chosen))
                dim = len(first.column(0)[0].as_py() or ())
        return VectorShape(rows, dim, _said(chosen, columns))
    matrix, note = read_vectors(where, columns)
    return VectorShape(len(matrix), matrix.shape[1], note)


def read_vectors(where: str, columns: tuple[str, ...] = ()) -> tuple[npt.NDArray[Any], str]:
    """The numbers of a file, [n, d], and which columns they are.

    Args:
        where: the file.
        columns: as of :func:`vector_shape`.

    Raises:
        DataError: the file cannot be read, or holds no numbers; names the place.
    """
    kind, listing = _listing(where)
    with listing.open(listing.files[0], decompress=kind != ".parquet") as stream:
        if kind == ".npy":
            npy_shape(stream, where)
            stream.seek(0)
            return np.asarray(np.load(stream, allow_pickle=False)), ""
        with readable(where):
            source = io.BytesIO(stream.read())
            if kind == ".csv":
                table = arrow("csv").read_csv(source)
            elif kind == ".jsonl":
                table = arrow("json").read_json(source)
            else:
                table = arrow("parquet").read_table(source)
            chosen = vector_columns(table.schema, columns, where)
            return matrix_of(table, chosen, where), _said(chosen, columns)


def check_finite(matrix: np.ndarray, where: str) -> None:
    """Refuse rows with NaN or infinity.

    Raises:
        DataError: names the first.
    """
    wrong = ~np.isfinite(matrix).all(axis=1)
    if wrong.any():
        raise DataError(
            f"{where}: row {int(wrong.argmax())} of {len(matrix)} has NaN, infinity or nothing "
            f"where a number should be, as {int(wrong.sum())} rows have; remove or fill them"
        )


def is_list(kind: Any) -> bool:
    """Whether a type of Arrow is a list of numbers."""
    types = arrow("types")
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_it(kind) for is_it in lists) and is_number(kind.value_type)


def is_number(kind: Any) -> bool:
    """Whether a type of Arrow is a number, or true and false."""
    types = arrow("types")
    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind))


def _listing(where: str) -> tuple[str, Any]:
    listing = find_files(where, "*", option="data")
    if not listing.single:
        raise DataError(f"data = {where!r}: a directory; give one file")
    name = listing.files[0].name.lower()
    for ending in (".gz", ".bz2", ".xz"):
        name = name.removesuffix(ending)
    for ending in _ENDINGS:
        if name.endswith(ending):
            return ending.replace("ndjson", "jsonl"), listing
    raise DataError(f"data = {where!r}: expected a file that ends with {', '.join(_ENDINGS)}")


def _said(chosen: list[str], columns: tuple[str, ...]) -> str:
    if columns:
        return ""
    more = f" and {len(chosen) - 6} more" if len(chosen) > 6 else ""
    return f"a vector is {', '.join(chosen[:6])}{more}; name others with --set columns=[...]"
