"""How each format of a table is read: its schema, where it can be cut, and the rows of a piece."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple, Protocol

import numpy as np

from shoal.core.counts import count
from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.corpora.files import Listing, find_files
from shoal.corpora.photos import DIM, photo_descriptors
from shoal.corpora.stdlib import Stdlib

BadRows = Literal["raise", "skip"]
"""What becomes of rows that cannot be read: an error that names the first, or a count."""

MAX_ROW = 64 * 2**20
"""Bytes of a line; a longer one cannot be read."""

_BLOCK = 8 * 2**20
_DOCUMENTS = 256
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Endings of compressed files."""


@dataclass
class BadRowCount:
    """Rows that were passed over.

    Args:
        rows: how many.
        first: where the first is, and what is wrong with it.
    """

    rows: int = 0
    first: str = ""

    def add(self, why: str, rows: int = 1) -> None:
        """Count more of them."""
        self.first = self.first or why
        self.rows += rows


class FilePiece(NamedTuple):
    """Rows of one file.

    Args:
        url: of the file; empty for a corpus of this machine.
        begin: first byte, row group, or file, as the format has it.
        end: what comes after the last; -1 for all.
    """

    url: str
    begin: int = 0
    end: int = -1


class Problem(Protocol):
    """Told about rows that cannot be read; raises, or counts them."""

    def __call__(self, why: str, rows: int = 1) -> None: ...


class TableFormat(NamedTuple):
    """How one format is read.

    Args:
        schema: of a file.
        pieces: (listing, bytes of a piece, problem) -> pieces that have every row once.
        batches: (piece, schema, problem) -> the rows of a piece, with that schema.
        rows: of a file, where it says so before it is read.
        by_bytes: whether a piece is a range of bytes.
        num_bytes: of what is no file.
    """

    schema: Callable[[Listing], Any]
    pieces: Callable[[Listing, int, Problem], Iterator[FilePiece]]
    batches: Callable[[FilePiece, Any, Problem], Iterator[Any]]
    rows: Callable[[Listing], int] | None = None
    by_bytes: bool = False
    num_bytes: Callable[[Listing], int] | None = None


def format_of(name: str) -> str:
    """The format of a file, by its name."""
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return _ENDINGS.get(name[name.rfind(".") :].lower(), "documents")


def arrow(module: str = "") -> Any:
    """A module of pyarrow."""
    name = f"pyarrow.{module}" if module else "pyarrow"
    return import_extra(name, extra="fields", purpose="reading tables")


@contextlib.contextmanager
def opened(piece: FilePiece, *, decompress: bool = True) -> Iterator[IO[bytes]]:
    """The file of a piece."""
    listing = find_files(piece.url, "*", option="data")
    with listing.open(listing.files[0], decompress=decompress) as stream:
        yield stream


@contextlib.contextmanager
def readable(where: str) -> Iterator[None]:
    """Say which file Arrow could not read."""
    try:
        yield
    except (arrow().ArrowException, OSError, EOFError, UnicodeDecodeError) as cause:
        reason = str(cause).partition("\n")[0]
        raise DataError(f"{where}: cannot be read ({reason}); repair or remove the file") from cause


# ---------------------------------------------------------------------------- lines


def _cut_lines(listing: Listing, num_bytes: int, problem: Problem) -> Iterator[FilePiece]:
    for file in listing.files:
        url = listing.url(file)
        if file.name.endswith(COMPRESSED):
            yield FilePiece(url)
            continue
        for begin in range(0, file.num_bytes, num_bytes):
            yield FilePiece(url, begin, min(begin + num_bytes, file.num_bytes))


def line_blocks(piece: FilePiece, problem: Problem) -> Iterator[tuple[int, bytes]]:
    r"""Whole lines that begin in the piece, some MB at a time, each block with its first byte.

    A line that begins before ``end`` is read to its end. Lines end with ``\n``, the last may not.
    """
    with opened(piece) as stream:
        at = piece.begin
        if at:
            stream.seek(at - 1)
            at -= 1
            skipped = stream.readline()  # of the piece before, unless a line begins at ``begin``
            at += len(skipped)
        while piece.end < 0 or at < piece.end:
            want = _BLOCK if piece.end < 0 else min(_BLOCK, piece.end - at)
            block = stream.read(want)
            if not block:
                break
            if not block.endswith(b"\n"):
                tail = stream.readline(MAX_ROW + 1)
                if len(tail) > MAX_ROW:
                    problem(f"{piece.url}, byte {at}: a row longer than {MAX_ROW // 2**20} MiB")
                    whole = block.rfind(b"\n") + 1
                    yield at, block[:whole]
                    at += len(block) + len(tail)
                    while tail and not tail.endswith(b"\n"):
                        tail = stream.readline(_BLOCK)
                        at += len(tail)
                    continue
                block += tail
            yield at, block
            at += len(block)


def _lines_schema(listing: Listing) -> Any:
    pa = arrow()
    return pa.schema([("text", pa.large_string())])


def _lines(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    pa = arrow()
    for _, block in line_blocks(piece, problem):
        lines = block.decode("utf-8", "replace").split("\n")
        if lines[-1] == "":
            lines.pop()
        texts = pa.array((line.removesuffix("\r") for line in lines), pa.large_string())
        yield pa.record_batch([texts], schema=schema)


# ---------------------------------------------------------------------------- JSON Lines


def _json_schema(listing: Listing) -> Any:
    pa = arrow()
    first = listing.files[0]
    with listing.open(first) as stream:
        block = stream.read(_BLOCK)
        if len(block) == _BLOCK:
            block = block[: block.rfind(b"\n") + 1] or block + stream.readline(MAX_ROW)
    seen: list[str] = []
    schema = None
    try:
        schema = arrow("json").read_json(io.BytesIO(block)).schema
    except pa.ArrowInvalid:  # a bad row: those that can be read say what the columns are
        rows = [row for row in (_object(line, seen.append) for line in block.split(b"\n")) if row]
        for some in (rows[:1000], rows[:1]):
            with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):
                schema = schema or (pa.Table.from_pylist(some).schema if some else None)
    if schema is None:
        raise DataError(
            f"{listing.url(first)}: no row can be read ({seen[0] if seen else 'empty'})"
        )
    text = pa.string()
    return pa.schema([one if one.type != pa.null() else one.with_type(text) for one in schema])


def _json(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    pa, read = arrow(), arrow("json").read_json
    options = arrow("json").ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    whole = arrow("json").ReadOptions(block_size=MAX_ROW + _BLOCK, use_threads=False)
    for at, block in line_blocks(piece, problem):
        if not block.strip():
            continue
        try:
            table = read(io.BytesIO(block), read_options=whole, parse_options=options)
            table.validate(full=True)  # text that is not UTF-8
        except pa.ArrowInvalid:
            table = _one_by_one(at, block, schema, piece.url, problem)
        yield from table.select(schema.names).to_batches()


def _one_by_one(at: int, block: bytes, schema: Any, url: str, problem: Problem) -> Any:
    """The rows of a block of which not all can be read."""
    pa = arrow()
    rows = []
    for line in block.split(b"\n"):
        where = f"{url}, byte {at}"
        at += len(line) + 1
        wrong: list[str] = []
        row = _object(line, wrong.append)
        if row is not None:
            row = {name: row.get(name) for name in schema.names}
            try:
                pa.RecordBatch.from_pylist([row], schema=schema)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeEncodeError) as cause:
                wrong.append(f"not of the columns' types: {str(cause).partition(chr(10))[0]}")
        if wrong:
            problem(f"{where}: {wrong[0]}")
        elif row is not None:
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=schema)


def _object(line: bytes, wrong: Callable[[str], None]) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        wrong(f"not UTF-8, byte {cause.start} of the row")
        return None
    except (ValueError, RecursionError) as cause:
        wrong(f"not JSON ({cause})")
        return None
    if not isinstance(row, dict):
        wrong(f"{type(row).__name__}, not an object")
        return None
    return row


# ---------------------------------------------------------------------------- Parquet


def _parquet_schema(listing: Listing) -> Any:
    pieces = FilePiece(listing.url(listing.files[0]))
    with readable(pieces.url), opened(pieces, decompress=False) as stream:
        schema = arrow("parquet").ParquetFile(stream).schema_arrow
    if len(set(schema.names)) < len(schema.names):
        raise DataError(f"{pieces.url}: several columns have one name; rename them")
    return schema.remove_metadata()


def _parquet_rows(listing: Listing) -> int:
    rows = 0
    for file in listing.files:
        with (
            readable(listing.url(file)),
            listing.open(file, decompress=False) as stream,
        ):
            rows += arrow("parquet").ParquetFile(stream).metadata.num_rows
    return rows


def _row_groups(listing: Listing, num_bytes: int, problem: Problem) -> Iterator[FilePiece]:
    for file in listing.files:
        url = listing.url(file)
        try:
            with readable(url), listing.open(file, decompress=False) as stream:
                meta = arrow("parquet").ParquetFile(stream).metadata
                sizes = [meta.row_group(at).total_byte_size for at in range(meta.num_row_groups)]
        except DataError as cause:
            problem(str(cause))
            continue
        begin = taken = 0
        for at, size in enumerate(sizes):
            taken += size
            if taken >= num_bytes or at == len(sizes) - 1:
                yield FilePiece(url, begin, at + 1)
                begin, taken = at + 1, 0


def _parquet(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    with readable(piece.url), opened(piece, decompress=False) as stream:
        file = arrow("parquet").ParquetFile(stream)
        for name in schema.names:
            has = file.schema_arrow
            if name not in has.names or has.field(name).type != schema.field(name).type:
                what = has.field(name).type if name in has.names else "missing"
                rows = sum(file.metadata.row_group(at).num_rows for at in _groups(piece))
                problem(
                    f"{piece.url}: column {name!r} is {what}, in the first file "
                    f"{schema.field(name).type}",
                    rows,
                )
                return
        for batch in file.iter_batches(
            row_groups=list(_groups(piece)), columns=schema.names, use_threads=False
        ):
            try:
                batch.validate(full=True)
                yield batch.select(schema.names)
            except arrow().ArrowInvalid as cause:
                good = [at for at in range(batch.num_rows) if _valid(batch.slice(at, 1))]
                problem(f"{piece.url}: {cause}", batch.num_rows - len(good))
                yield batch.select(schema.names).take(arrow().array(good, arrow().int64()))


def _groups(piece: FilePiece) -> range:
    return range(piece.begin, piece.end)


def _valid(batch: Any) -> bool:
    try:
        arrow().RecordBatch.from_arrays(
            [arrow().concat_arrays([column]) for column in batch.columns], batch.schema.names
        ).validate(full=True)
    except arrow().ArrowInvalid:
        return False
    return True


# ---------------------------------------------------------------------------- whole files


def _each_file(listing: Listing, num_bytes: int, problem: Problem) -> Iterator[FilePiece]:
    for file in listing.files:
        yield FilePiece(listing.url(file))


def _csv_schema(listing: Listing) -> Any:
    url = listing.url(listing.files[0])
    with readable(url), listing.open(listing.files[0]) as stream:
        return arrow("csv").open_csv(stream).schema


def _csv(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    csv = arrow("csv")

    def invalid(row: Any) -> str:
        problem(
            f"{piece.url}, row {row.number}: {row.actual_columns} columns, "
            f"{row.expected_columns} expected"
        )
        return "skip"

    with readable(piece.url), opened(piece) as stream:
        reader = csv.open_csv(
            stream,
            read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=invalid),
            convert_options=csv.ConvertOptions(column_types=schema, include_columns=schema.names),
        )
        yield from reader


def _ipc_schema(listing: Listing) -> Any:
    url = listing.url(listing.files[0])
    with readable(url), listing.open(listing.files[0]) as stream:
        return arrow("ipc").open_file(stream).schema.remove_metadata()


def _ipc(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    with readable(piece.url), opened(piece) as stream:
        reader = arrow("ipc").open_file(stream)
        for at in range(reader.num_record_batches):
            batch = reader.get_batch(at)
            batch.validate(full=True)
            yield batch.select(schema.names).replace_schema_metadata(None)


def _document_schema(listing: Listing | None) -> Any:
    pa = arrow()
    return pa.schema([("name", pa.string()), ("text", pa.large_string())])


def _stdlib(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    yield from _documents(((one.name, one.text) for one in Stdlib().documents()), schema)


def _documents(texts: Iterator[tuple[str, str]], schema: Any) -> Iterator[Any]:
    rows: list[dict[str, str]] = []
    for name, text in texts:
        rows.append({"name": name, "text": text})
        if len(rows) == _DOCUMENTS:
            yield arrow().RecordBatch.from_pylist(rows, schema=schema)
            rows = []
    if rows:
        yield arrow().RecordBatch.from_pylist(rows, schema=schema)


def _whole_text(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    with opened(piece) as stream:
        data = stream.read(MAX_ROW + 1)
    if len(data) > MAX_ROW:
        problem(f"{piece.url}: a document longer than {MAX_ROW // 2**20} MiB")
        return
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        problem(f"{piece.url}: not UTF-8, byte {cause.start}")
        return
    yield from _documents(iter([(piece.url.rpartition("/")[2], text)]), schema)


def npy_shape(stream: IO[bytes], where: str) -> tuple[int, int, np.dtype[Any]]:
    """Rows, columns and type of a file of numpy; the stream is left where its numbers begin.

    Raises:
        DataError: it is none, or not of numbers in two dimensions.
    """
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
    return int(shape[0]), int(shape[1]), dtype


def _npy_schema(listing: Listing) -> Any:
    pa, url = arrow(), listing.url(listing.files[0])
    with listing.open(listing.files[0]) as stream:
        _, dim, dtype = npy_shape(stream, url)
    return pa.schema([("vector", pa.list_(pa.from_numpy_dtype(dtype), dim))])


def _npy_rows(listing: Listing) -> int:
    rows = 0
    for file in listing.files:
        with listing.open(file) as stream:
            rows += npy_shape(stream, listing.url(file))[0]
    return rows


def _npy(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    pa, (kind,) = arrow(), schema.types
    with opened(piece) as stream:
        _, dim, _ = npy_shape(stream, piece.url)
        if dim != kind.list_size:
            raise DataError(
                f"{piece.url}: {dim} columns, in the first file {kind.list_size}; give files of "
                "vectors of one length"
            )
        stream.seek(0)
        values = pa.array(np.load(stream, allow_pickle=False).ravel(), kind.value_type)
    lists = pa.FixedSizeListArray.from_arrays(values, dim)
    yield pa.record_batch([lists], schema=schema)


_ENDINGS = {
    ".npy": "npy",
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".log": "lines",
}

FORMATS = {
    "parquet": TableFormat(_parquet_schema, _row_groups, _parquet, _parquet_rows),
    "jsonl": TableFormat(_json_schema, _cut_lines, _json, by_bytes=True),
    "csv": TableFormat(_csv_schema, _each_file, _csv),
    "arrow": TableFormat(_ipc_schema, _each_file, _ipc),
    "lines": TableFormat(_lines_schema, _cut_lines, _lines, by_bytes=True),
    "npy": TableFormat(_npy_schema, _each_file, _npy, _npy_rows),
    "documents": TableFormat(_document_schema, _each_file, _whole_text),
}
"""TableFormat -> how it is read."""


def _whole(listing: Listing, num_bytes: int, problem: Problem) -> Iterator[FilePiece]:
    yield FilePiece(listing.where)


def _labelled(dim: int) -> Callable[[Listing], Any]:
    def schema(listing: Listing) -> Any:
        pa = arrow()
        return pa.schema([("vector", pa.list_(pa.float32(), dim)), ("label", pa.int64())])

    return schema


def _vectors(vectors: Any, labels: Any, schema: Any) -> Iterator[Any]:
    pa = arrow()
    values = pa.array(vectors.astype("float32").ravel())
    lists = pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])
    yield pa.record_batch([lists, pa.array(labels)], ["vector", "label"]).select(schema.names)


def _digits(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    datasets = import_extra("sklearn.datasets", extra="fields", purpose="data = digits")
    images, labels = datasets.load_digits(return_X_y=True)
    yield from _vectors(images / 16.0, labels.astype("int64"), schema)


def num_photos(where: str) -> int:
    """N of ``photos:N``; 8,000 where it is not given.

    Raises:
        ConfigError: it is no number.
    """
    _, _, text = where.partition(":")
    return count(text, "data = photos:N") if text else 8000


def _photos(piece: FilePiece, schema: Any, problem: Problem) -> Iterator[Any]:
    found = photo_descriptors(num_photos(piece.url))
    yield from _vectors(found.vectors, found.photo, schema)


NAMED = {
    "stdlib": TableFormat(
        _document_schema, _whole, _stdlib, num_bytes=lambda listing: Stdlib().num_bytes()
    ),
    "digits": TableFormat(
        _labelled(64),
        _whole,
        _digits,
        rows=lambda listing: 1797,
        num_bytes=lambda listing: 1797 * 65 * 8,
    ),
    "photos": TableFormat(
        _labelled(DIM),
        _whole,
        _photos,
        rows=lambda listing: num_photos(listing.where),
        num_bytes=lambda listing: num_photos(listing.where) * (4 * DIM + 8),
    ),
}
"""What is on every machine: the standard library of this Python, a row for each module; the digits
of scikit-learn; ``photos:N``, descriptors of its photographs, labelled by the photograph."""
