"""Event files of TensorBoard, read without TensorBoard.

A file is a row of records: length, its checksum, data, its checksum. The data is a protocol
buffer: wall time, step and scalars by name. Anything else in it is skipped.

Source: the TFRecord format; ``event.proto`` and ``summary.proto`` of TensorBoard.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.imports.curves import known
from shoal.cost.imports.log import Log, LogEntry, paced

# A record of scalars is small; longer ones are pictures and graphs, whose sums are not checked.
CHECKED = 1 << 16
LONGEST = 1 << 28
_POLYNOMIAL = 0x82F63B78


@part
class TensorBoardLog:
    """``events.out.tfevents...``, or a directory of them; curves are matched by name."""

    def sniff(self, path: Path) -> int:
        return 1_000_000 if _files(path) else 0

    def read(self, path: Path) -> Log:
        files = _files(path) or [path]
        steps: dict[int, dict[str, float]] = {}
        times: dict[int, float] = {}
        names: set[str] = set()
        for file in files:
            for wall, step, name, value in scalars(file):
                names.add(name)
                curve = known(name)
                if curve is not None:
                    steps.setdefault(step, {})[curve[0]] = curve[1] * value
                    times[step] = wall
        if not steps:
            seen = f"there are {', '.join(sorted(names)[:8])}" if names else "there is none"
            raise DataError(
                f"{path}: no curve of loss, time, throughput or memory; {seen}; give the event "
                "file of a training run"
            )
        order = sorted(steps)
        entries = [LogEntry(step, 0, steps[step]) for step in order]
        return Log("tensorboard", path, "train", paced(entries, [times[step] for step in order]))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*tfevents*"))
    return [path] if "tfevents" in path.name and path.is_file() else []


def scalars(path: Path) -> Iterator[tuple[float, int, str, float]]:
    """(wall time in s, step, name, value) of every scalar.

    A record that was cut off at the end, as by a crash, ends the file.

    Raises:
        DataError: it is no event file, or it is damaged; names the record.
    """
    for place, data in enumerate(_records(path), 1):
        try:
            yield from _event(data)
        except (IndexError, struct.error, UnicodeDecodeError) as cause:
            raise DataError(
                f"{path}, record {place}: not an event of TensorBoard; give an event file"
            ) from cause


def _records(path: Path) -> Iterator[bytes]:
    place = 0
    try:
        with path.open("rb") as file:
            while len(begin := file.read(12)) == 12:
                place += 1
                (length,) = struct.unpack("<Q", begin[:8])
                if _masked(begin[:8]) != struct.unpack("<I", begin[8:])[0] or length > LONGEST:
                    raise DataError(
                        f"{path}, record {place}: its length is damaged, or this is no event file "
                        "of TensorBoard; give another file or --format"
                    )
                data, end = file.read(length), file.read(4)
                if len(data) < length or len(end) < 4:
                    return
                if length <= CHECKED and _masked(data) != struct.unpack("<I", end)[0]:
                    raise DataError(
                        f"{path}, record {place}: its checksum is wrong; copy the file again"
                    )
                yield data
    except OSError as cause:
        raise DataError(
            f"{path}: cannot be read ({cause.strerror or cause}); give a file that exists"
        ) from cause
    if place == 0:
        raise DataError(f"{path}, record 1: no event file of TensorBoard; give one")


def _event(data: bytes) -> Iterator[tuple[float, int, str, float]]:
    wall, step, summaries = 0.0, 0, []
    for number, kind, value in _fields(data):
        if number == 1 and kind == 1:
            (wall,) = struct.unpack("<d", value)
        elif number == 2 and kind == 0:
            step = int.from_bytes(value, "little")
        elif number == 5 and kind == 2:
            summaries.append(value)
    for summary in summaries:
        for number, kind, value in _fields(summary):
            if number == 1 and kind == 2:
                name, scalar = _value(value)
                if scalar is not None:
                    yield wall, step, name, scalar


def _value(data: bytes) -> tuple[str, float | None]:
    name, scalar = "", None
    for number, kind, value in _fields(data):
        if number == 1 and kind == 2:
            name = value.decode("utf-8")
        elif number == 2 and kind == 5:
            (scalar,) = struct.unpack("<f", value)
        elif number == 8 and kind == 2:
            scalar = _tensor(value)
    return name, scalar


def _tensor(data: bytes) -> float | None:
    """The number of a tensor of one float or double; None for others."""
    dtype, tensor = 0, None
    for number, kind, value in _fields(data):
        if number == 1 and kind == 0:
            dtype = int.from_bytes(value, "little")
        elif number == 4 and kind == 2 and dtype in (1, 2):  # its bytes
            form = "<f" if dtype == 1 else "<d"
            if len(value) == struct.calcsize(form):
                (tensor,) = struct.unpack(form, value)
        elif number == 5 and kind in (2, 5) and len(value) == 4:  # floats
            (tensor,) = struct.unpack("<f", value)
        elif number == 6 and kind in (1, 2) and len(value) == 8:  # doubles
            (tensor,) = struct.unpack("<d", value)
    return tensor


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, wire type, bytes) of each field; of a varint its value, eight bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            result, place = _varint(data, place)
            yield key >> 3, kind, result.to_bytes(8, "little")
            continue
        if kind == 2:
            length, place = _varint(data, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise IndexError(kind)
        if place + length > len(data):
            raise IndexError(place)
        yield key >> 3, kind, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), place
    raise IndexError(place)


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        rest = byte
        for _ in range(8):
            rest = (rest >> 1) ^ (_POLYNOMIAL if rest & 1 else 0)
        table.append(rest)
    return tuple(table)


_TABLE = _table()


def _masked(data: bytes) -> int:
    """The checksum of a record: CRC-32C, rotated and shifted."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
