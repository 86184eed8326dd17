"""A log in a small container, and back, byte for byte.

Lines are cut into fields of their header, contents into templates and parameters, and each field
and each parameter of each template is a column of its own. A line that this does not fit is kept as
it is. The container has blocks of some MB of lines, each with templates of its own, and ends with
the size and the SHA-256 of the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import expanded, open_atomic
from shoal.fields.data.logs.formats import LogFormat, format_named
from shoal.fields.data.logs.native import (
    TemplateTree,
    gather,
    header_fields,
    parameters,
    split_lines,
)
from shoal.fields.data.logs.packed.columns import StreamReader, StreamWriter, zstd
from shoal.fields.data.logs.reading import LogFiles, masked
from shoal.fields.data.logs.templates import unified
from shoal.fields.data.readers import arrow

_MAGIC = b"SHOALOG1"
_END = struct.Struct("<Q32s")
_SIZE = struct.Struct("<I")
# Bytes of text of a block: templates and dictionaries are written again in each.
_BLOCK = 32 * 2**20
# Every number is a parameter: its digits are cheaper as a number.
_MASKS = (r"\d+",)
_ROUTED, _SIMILARITY, _CHILDREN = 1, 0.5, 100
_VERBATIM = b"<*>"
_FEWEST = 6
_ENDINGS = (b"\n", b"\r\n", b"")

Tick = Callable[[float], None]


def pack(
    source: str | Path,
    target: str | Path,
    *,
    form: str = "auto",
    tick: Tick = lambda done: None,
) -> int:
    """Write a log as a container.

    Args:
        source: a log, of any ending; what is compressed is decompressed.
        target: the container; whole or not at all.
        form: name of its format, or ``auto``.
        tick: called with the number of bytes that are done.

    Returns:
        Bytes of the container.

    Raises:
        DataError: the log cannot be read, or is no text.
        ConfigError: there is no such format.
        ShoalError: the container cannot be written.
    """
    files = LogFiles(str(source))
    known = files.recognized() if form == "auto" else format_named(form)
    return pack_files(files, known, expanded(target), tick)


def pack_files(files: LogFiles, form: LogFormat, target: Path, tick: Tick) -> int:
    """The same of a log whose format is known.

    Raises:
        DataError: it is several files.
    """
    if len(files.listing.files) != 1:
        raise DataError(
            f"data = {files.where!r}: {len(files.listing.files)} files; a container has one, "
            "choose it with pattern"
        )
    digest, size = hashlib.sha256(), 0
    zstd()  # what is missing is said before anything is written
    with open_atomic(target) as file:
        file.write(_MAGIC)
        for text in _joined(files.texts()):
            digest.update(text)
            size += len(text)
            block = packed_block(text, form)
            file.write(_SIZE.pack(len(block)) + block)
            tick(size)
        file.write(_SIZE.pack(0) + _END.pack(size, digest.digest()))
    return target.stat().st_size


def unpack(source: str | Path, target: str | Path, *, tick: Tick = lambda done: None) -> int:
    """Write the log of a container.

    Args:
        source: the container.
        target: the log; whole or not at all.
        tick: called with the number of bytes that are done.

    Returns:
        Bytes of the log.

    Raises:
        DataError: no container, or a damaged one.
        ShoalError: the log cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with _container(source) as file, open_atomic(expanded(target)) as out:
        file.seek(len(_MAGIC))
        while (stored := _SIZE.unpack(file.read(_SIZE.size))[0]) != 0:
            text = unpacked_block(file.read(stored))
            out.write(text)
            digest.update(text)
            size += len(text)
            tick(size)
        if (size, digest.digest()) != _END.unpack(file.read(_END.size)):
            raise DataError(f"{source}: damaged: the log in it is not the one that was packed")
    return size


def unpacked_bytes(source: str | Path) -> int:
    """Bytes of the log of a container.

    Raises:
        DataError: no container, or a damaged one.
    """
    with _container(source) as file:
        file.seek(-_END.size, os.SEEK_END)
        return int(_END.unpack(file.read(_END.size))[0])


def packed_block(text: bytes, form: LogFormat) -> bytes:
    """Some lines as columns."""
    out = StreamWriter()
    lines = split_lines(text)
    n, program = len(lines.begin), form.program
    out.text(struct.pack("<I", n) + form.header.encode())
    out.ints(lines.ending.astype(np.int64))
    spans, ok = header_fields(text, lines, program, flexible=False)
    out.ints(ok.astype(np.int64))
    rows = np.flatnonzero(ok)
    for place in range(len(program.fields) - 1):
        there = spans[rows, place, 0] >= 0
        out.ints(there.astype(np.int64))
        out.texts(gather(text, np.ascontiguousarray(spans[rows[there], place])).to_pylist())
    _pack_contents(out, gather(text, spans[:, -1]))
    return out.packed()


def unpacked_block(data: bytes) -> bytes:
    """The lines of :func:`packed_block`.

    Raises:
        DataError: it is damaged.
    """
    try:
        streams = StreamReader(data)
        head = streams.text()
        (n,) = struct.unpack_from("<I", head)
        program = LogFormat("packed", head[4:].decode()).program
        endings = [_ENDINGS[ending] for ending in streams.ints(n).tolist()]
        ok = streams.ints(n).astype(bool)
        rows = int(ok.sum())
        fields: list[list[bytes | None]] = []
        for _ in program.fields[:-1]:
            there = streams.ints(rows).tolist()
            values = iter(streams.texts(sum(there)))
            fields.append([next(values) if one else None for one in there])
        contents = _unpack_contents(streams, n)
        headers = iter(_headers(program, fields, rows))
        return b"".join(
            (next(headers) if good else b"") + content + ending
            for good, content, ending in zip(ok.tolist(), contents, endings, strict=True)
        )
    except (struct.error, ValueError, IndexError, StopIteration, zstd().ZstdError) as cause:
        raise DataError(
            f"a block of the container is damaged ({cause}); pack the log again"
        ) from cause


def _headers(program: Any, fields: list[list[bytes | None]], rows: int) -> Iterator[bytes]:
    """The text before the content of each line that has the header."""
    items = program.items.tolist()
    for row in range(rows):
        pieces: list[bytes] = []
        at = 0
        while at < len(items) - 1:  # the last is the content
            kind, a, b = items[at]
            if kind == 0:
                pieces.append(fields[a][row] or b"")
            elif kind == 1:
                pieces.append(program.texts[a : a + b])
            elif kind == 2 and all(
                fields[items[k][1]][row] is None for k in range(at, a) if items[k][0] == 0
            ):
                at = a - 1
            at += 1
        yield b"".join(pieces)


def _pack_contents(out: StreamWriter, column: Any) -> None:
    tree = TemplateTree(_ROUTED, _SIMILARITY, _CHILDREN, exact=True)
    groups = tree.add(masked(column, _MASKS))
    mined = unified(tree.templates())
    ids = mined.ids[groups] if len(groups) else groups
    templates = [*mined.templates, _VERBATIM]
    ok = parameters(column, ids, templates, flexible=False).ok
    # Columns of a few values take more than they save.
    rare = np.bincount(ids, minlength=len(templates)) < _FEWEST
    ids[~ok | rare[ids]] = len(templates) - 1
    found = parameters(column, ids, templates, flexible=False)
    used, places = np.unique(ids, return_inverse=True)
    templates = [templates[at] for at in used.tolist()]
    out.ints(np.array([len(templates)], np.int64))
    out.texts(templates)
    out.ints(places.astype(np.int64))
    starts = np.cumsum(found.counts) - found.counts
    for at, template in enumerate(templates):
        rows = starts[places == at]
        for place in range(template.count(b"<*>")):
            out.texts(found.values.take(arrow().array(rows + place)).to_pylist())


def _unpack_contents(streams: StreamReader, n: int) -> list[bytes]:
    templates = streams.texts(int(streams.ints(1)[0]))
    ids = streams.ints(n)
    result: list[bytes] = [b""] * n
    for at, template in enumerate(templates):
        rows = np.flatnonzero(ids == at).tolist()
        pieces = template.split(b"<*>")
        columns = [streams.texts(len(rows)) for _ in pieces[1:]]
        if not columns:
            for row in rows:
                result[row] = template
            continue
        first, *others = pieces
        for row, values in zip(rows, zip(*columns, strict=True), strict=True):
            result[row] = first + b"".join(
                text for pair in zip(values, others, strict=True) for text in pair
            )
    return result


def _joined(texts: Iterator[bytes]) -> Iterator[bytes]:
    """Blocks put together to the size of a container's."""
    waiting: list[bytes] = []
    for text in texts:
        waiting.append(text)
        if sum(map(len, waiting)) >= _BLOCK:
            yield b"".join(waiting)
            waiting = []
    if waiting:
        yield b"".join(waiting)


@contextlib.contextmanager
def _container(source: str | Path) -> Iterator[IO[bytes]]:
    """The file of a container.

    Raises:
        DataError: it is none, or cut short.
    """
    path = expanded(source)
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            size = file.seek(0, os.SEEK_END)
            if magic != _MAGIC or size < len(_MAGIC) + _SIZE.size + _END.size:
                raise DataError(
                    f"{source}: no container of a log, or cut short; give one that pack has written"
                )
            yield file
    except (OSError, struct.error) as cause:
        raise DataError(f"{source}: cannot be read ({cause}); give a container of a log") from cause
