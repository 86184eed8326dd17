"""Reading what is clustered: vectors or dissimilarities from a file, or from the photographs."""

from __future__ import annotations

import io
from typing import IO, Any, NamedTuple

import numpy as np

from shoal.core.counts import count
from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.corpora.files import find_files
from shoal.corpora.photos import DIM, photo_descriptors
from shoal.fields.data.cluster.job import ClusterJob
from shoal.fields.data.cluster.protocols import ClusterError
from shoal.fields.data.cluster.storage import Objects, Precomputed, Vectors

_PHOTOS = "photos"
_ENDINGS = (".npy", ".parquet", ".csv", ".jsonl", ".ndjson")


class InputShape(NamedTuple):
    """How much there is, before it is read.

    Args:
        n: objects.
        dim: numbers of a vector; 0 where dissimilarities are given.
        note: which columns were taken; empty where there is no choice.
    """

    n: int
    dim: int
    note: str


def shape_of(job: ClusterJob) -> InputShape:
    """Rows and columns of a job's data; .npy and .parquet say so in their first bytes.

    Raises:
        DataError: the file cannot be read, or holds no numbers.
    """
    precomputed = job.metric == "precomputed"
    if job.data.partition(":")[0] == _PHOTOS:
        _not_precomputed(job)
        return InputShape(_photos(job), DIM, "")
    kind, listing = _listing(job)
    if kind == ".npy":
        with listing.open(listing.files[0]) as stream:
            rows, columns = _npy_shape(stream, job.data)
        return InputShape(rows, 0 if precomputed else columns, "")
    if kind == ".parquet":
        parquet = _arrow("pyarrow.parquet")
        with listing.open(listing.files[0], decompress=False) as stream, _readable(job):
            file = parquet.ParquetFile(stream)
            chosen = _columns(file.schema_arrow, job)
            rows = file.metadata.num_rows
            lists = len(chosen) == 1 and _is_list(file.schema_arrow.field(chosen[0]).type)
            dim = len(chosen)
            if lists and rows:
                first = next(file.iter_batches(batch_size=1, columns=chosen))
                dim = len(first.column(0)[0].as_py() or ())
        return InputShape(rows, 0 if precomputed else dim, _said(chosen, job))
    matrix, note = _read(job)
    return InputShape(len(matrix), 0 if precomputed else matrix.shape[1], note)


def objects_of(job: ClusterJob) -> Objects:
    """The objects of a job.

    Raises:
        DataError: the file cannot be read, or holds no numbers; names the place.
        ClusterError: dissimilarities that cannot be used, or a metric that there is not.
    """
    if job.data.partition(":")[0] == _PHOTOS:
        _not_precomputed(job)
        return Vectors(photo_descriptors(_photos(job)).vectors, job.metric)
    matrix, _ = _read(job)
    if job.metric == "precomputed":
        return Precomputed(matrix, symmetric=job.symmetric)
    wrong = ~np.isfinite(matrix).all(axis=1)
    if wrong.any():
        raise DataError(
            f"{job.data}: row {int(wrong.argmax())} of {len(matrix)} has NaN, infinity or nothing "
            f"where a number should be, as {int(wrong.sum())} rows have; remove or fill them"
        )
    return Vectors(matrix, job.metric)


def _photos(job: ClusterJob) -> int:
    _, _, text = job.data.partition(":")
    return count(text, "data = photos:N") if text else 8000


def _not_precomputed(job: ClusterJob) -> None:
    if job.metric == "precomputed":
        raise ClusterError("metric = precomputed: photos are vectors; choose cosine or euclidean")


def _listing(job: ClusterJob) -> tuple[str, Any]:
    listing = find_files(job.data, "*", option="data")
    if not listing.single:
        raise DataError(f"data = {job.data!r}: a directory; give one file")
    name = listing.files[0].name.lower()
    for ending in (".gz", ".bz2", ".xz"):
        name = name.removesuffix(ending)
    for ending in _ENDINGS:
        if name.endswith(ending):
            return ending.replace("ndjson", "jsonl"), listing
    raise DataError(f"data = {job.data!r}: expected a file that ends with {', '.join(_ENDINGS)}")


def _arrow(module: str) -> Any:
    return import_extra(module, extra="fields", purpose="reading tables")


class _readable:  # noqa: N801 - a context manager
    """Say which file Arrow could not read."""

    def __init__(self, job: ClusterJob) -> None:
        self._where = job.data

    def __enter__(self) -> None:
        self._failures = (_arrow("pyarrow").ArrowException, UnicodeDecodeError, EOFError)

    def __exit__(self, kind: Any, cause: BaseException | None, trace: Any) -> None:
        if isinstance(cause, self._failures):
            raise DataError(
                f"{self._where}: cannot be read ({str(cause).partition(chr(10))[0]}); repair the "
                "file, or give the ending that says what it is"
            ) from cause


def _read(job: ClusterJob) -> tuple[np.ndarray, str]:
    """The numbers of a file, float64 or float32 [n, d], and which columns they are."""
    kind, listing = _listing(job)
    with listing.open(listing.files[0], decompress=kind != ".parquet") as stream:
        if kind == ".npy":
            _npy_shape(stream, job.data)
            stream.seek(0)
            return np.asarray(np.load(stream, allow_pickle=False)), ""
        with _readable(job):
            source = io.BytesIO(stream.read())
            if kind == ".csv":
                table = _arrow("pyarrow.csv").read_csv(source)
            elif kind == ".jsonl":
                table = _arrow("pyarrow.json").read_json(source)
            else:
                table = _arrow("pyarrow.parquet").read_table(source)
            chosen = _columns(table.schema, job)
            return _matrix(table, chosen, job), _said(chosen, job)


def _npy_shape(stream: IO[bytes], where: str) -> tuple[int, int]:
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(stream)
    except ValueError as cause:
        raise DataError(f"{where}: not an array of numpy ({cause}); give a whole .npy") from cause
    if len(shape) != 2 or dtype.kind not in "fiub":
        raise DataError(
            f"{where}: an array of shape {shape} and type {dtype}: expected numbers in two "
            "dimensions, a row for each object"
        )
    return int(shape[0]), int(shape[1])


def _is_list(kind: Any) -> bool:
    types = _arrow("pyarrow").types
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(is_it(kind) for is_it in lists) and _is_number(kind.value_type)


def _is_number(kind: Any) -> bool:
    types = _arrow("pyarrow").types
    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind))


def _columns(schema: Any, job: ClusterJob) -> list[str]:
    """The columns that make up a vector: one of lists, or some of numbers."""
    known = {name: schema.field(name).type for name in schema.names}
    for name in job.columns:
        if name not in known:
            raise DataError(
                f"{job.data}: columns: there is no {name!r}; it has {', '.join([*known][:20])}"
            )
        if not (_is_number(known[name]) or _is_list(known[name])):
            raise DataError(f"{job.data}: columns: {name!r} holds {known[name]}, not numbers")
    chosen = list(job.columns) or [name for name, kind in known.items() if _is_list(kind)]
    chosen = chosen or [name for name, kind in known.items() if _is_number(kind)]
    if not chosen:
        raise DataError(f"{job.data}: no column of numbers among {', '.join([*known][:20])}")
    if len(chosen) > 1 and any(_is_list(known[name]) for name in chosen):
        raise DataError(
            f"{job.data}: several columns with lists: {', '.join(chosen)}; name one in columns"
        )
    return chosen


def _said(chosen: list[str], job: ClusterJob) -> str:
    if job.columns:
        return ""
    more = f" and {len(chosen) - 6} more" if len(chosen) > 6 else ""
    return f"a vector is {', '.join(chosen[:6])}{more}; name others with --set columns=[...]"


def _matrix(table: Any, chosen: list[str], job: ClusterJob) -> np.ndarray:
    if not _is_list(table.schema.field(chosen[0]).type):
        columns = [table.column(name).to_numpy().astype(np.float64) for name in chosen]
        return np.stack(columns, axis=1)
    column = table.column(chosen[0]).combine_chunks()
    lengths = {None if row is None else len(row) for row in column.to_pylist()}
    if len(lengths) != 1 or None in lengths:
        raise DataError(
            f"{job.data}: column {chosen[0]!r}: lists of different lengths "
            f"({', '.join(sorted(map(str, lengths))[:5])}); every object needs as many numbers"
        )
    flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return flat.astype(np.float64).reshape(len(column), -1)
