"""Columns of short texts, and of numbers, as few bytes.

A column is written in the way that takes the fewest bytes: one value, numbers between constant
text such as ``20:10:40``, a dictionary, or text. Numbers are kept as they are or as differences,
byte by byte in planes or value by value, whatever zstd makes smallest.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.fields.data.logs.protocols import Longs

_T = TypeVar("_T")

_ONE, _NUMBERS, _DICTIONARY, _TEXT, _LINES, _SAME = range(6)
_PLANES, _DELTA_PLANES, _ROWS = range(3)
_DIGITS = re.compile(rb"[0-9]+")
# Columns and sizes of a container: streams, text, frames, directory.
_HEAD = struct.Struct("<IIII")
# Digits of a number that may fit in 63 bits.
_MOST = 19
# Streams of numbers of fewer bytes share a frame.
_SMALL = 512
# Values for each kind of text around numbers, and for each value of a dictionary, at least.
_ALIKE, _AGAIN = 8, 4
# Numbers from here on, such as those of blocks, are written once for all columns.
_LARGE, _KNOWN = 2**32, -1
# Units of time, of which a field of digits has all values but the last.
_UNITS = (24, 60)
_TRIAL, _LEVEL = 3, 19


class StreamWriter:
    """Byte strings, known by their order: texts in one frame, numbers alone or with small ones."""

    def __init__(self) -> None:
        self._numbers: list[bytes] = []
        self._texts: list[bytes] = []
        self._columns: dict[tuple[bytes, ...], int] = {}
        self._known_texts: dict[bytes, int] = {}
        self._known_numbers: dict[int, int] = {}
        self._zstd = zstd()

    def text(self, data: bytes) -> None:
        """One more text; zstd sees what it has in common with the others."""
        self._texts.append(data)

    def ints(self, values: Longs) -> None:
        """Numbers of int64, any."""
        few = _frame(self._zstd, _TRIAL)
        ways = []
        first = int(values[0]) if len(values) else 0
        for way in (_PLANES, _DELTA_PLANES, _ROWS):
            shown = np.diff(values, prepend=first) if way == _DELTA_PLANES else values
            lowest = int(shown.min()) if len(shown) else 0
            moved = (shown - np.int64(lowest)).view(np.uint64)
            width = (int(moved.max(initial=0)).bit_length() + 7) // 8
            planes = moved.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
            if way != _ROWS:
                planes = planes.T
            data = np.ascontiguousarray(planes).tobytes()
            cost = len(few.compress(data)) if len(data) > 16 else len(data)
            ways.append((cost, way, lowest, width, data))
            if not width:  # all are alike
                break
        _, way, lowest, width, data = min(ways)
        base = first if way == _DELTA_PLANES else 0
        self._numbers.append(bytes([8 * width + way]) + _varint(lowest) + _varint(base))
        size = len(values)
        pieces = [data] if way == _ROWS else [data[at * size :][:size] for at in range(width)]
        self._numbers += pieces if width else []

    def texts(self, values: Sequence[bytes]) -> None:
        """Short texts, any."""
        distinct = list(dict.fromkeys(values))
        if len(distinct) <= 1:
            self._kind(_ONE)
            self.text(distinct[0] if distinct else b"")
            return
        column = tuple(values)
        if column in self._columns:
            self._kind(_SAME)
            self.ints(np.array([self._columns[column]], np.int64))
            return
        self._several(values, distinct)
        self._columns[column] = len(self._columns)

    def _several(self, values: Sequence[bytes], distinct: Sequence[bytes]) -> None:
        if _AGAIN * len(distinct) <= len(values):
            self._kind(_DICTIONARY)
            self.ints(np.array([len(distinct)], np.int64))
            self.texts(distinct)
            places = {value: place for place, value in enumerate(distinct)}
            self.ints(np.array([places[value] for value in values], np.int64))
        elif (groups := _numbers(values)) is not None:
            self._kind(_NUMBERS)
            self.text(b"\n".join(groups))
            kinds = np.empty(len(values), np.int64)
            for kind, group in enumerate(groups.values()):
                kinds[group.rows] = kind
            self.ints(kinds)
            for group in groups.values():
                self._of_numbers(group)
        elif any(b"\n" in value for value in distinct):
            self._kind(_TEXT)
            self.ints(np.array([len(value) for value in values], np.int64))
            self.text(b"".join(values))
        else:
            self._kind(_LINES)
            new = self._ranks(values, self._known_texts)
            self.text(b"\n".join(new))

    def packed(self) -> bytes:
        """All of it."""
        most = _frame(self._zstd, _LEVEL)
        small = b"".join(data for data in self._numbers if len(data) < _SMALL)
        text = b"".join(self._texts)
        frames = [most.compress(text), most.compress(small)]
        frames += [most.compress(data) for data in self._numbers if len(data) >= _SMALL]
        sizes = [*map(len, self._numbers), *map(len, self._texts), *map(len, frames)]
        directory: bytes = most.compress(
            np.array(sizes, "<u4").view(np.uint8).reshape(-1, 4).T.tobytes()
        )
        counts = len(self._numbers), len(self._texts), len(frames), len(directory)
        return _HEAD.pack(*counts) + directory + b"".join(frames)

    def _ranks(self, values: Sequence[_T], known: dict[_T, int]) -> list[_T]:
        """Write values as places in the order in which they first occur in any column.

        Returns:
            Those that have not occurred before.
        """
        before = len(known)
        ranks = [known.setdefault(value, len(known)) for value in values]
        self.ints(np.array([len(known) - before], np.int64))
        self.ints(np.array(ranks, np.int64))
        return list(itertools.islice(known, before, None))

    def _kind(self, kind: int) -> None:
        self._numbers.append(bytes([kind]))

    def _of_numbers(self, group: _Numbers) -> None:
        radix = _radix(group.columns, group.widths)
        known = [_KNOWN if int(column.max()) >= _LARGE else 0 for column in group.columns]
        if group.widths:
            self.ints(np.array([*group.widths, *(radix or known)], np.int64))
        if not radix:
            for column, pooled in zip(group.columns, known, strict=True):
                if pooled:
                    new = self._ranks(column.tolist(), self._known_numbers)
                    self.ints(np.array(new, np.int64))
                else:
                    self.ints(column)
            return
        whole = np.zeros(len(group.rows), np.int64)
        for column, unit in zip(group.columns, radix, strict=True):
            whole = whole * unit + column
        self.ints(whole)


class StreamReader:
    """What a :class:`StreamWriter` has written, in the same order.

    Args:
        data: of ``packed``.
    """

    def __init__(self, data: bytes) -> None:
        module = zstd()
        self._zstd = module.ZstdDecompressor(format=module.FORMAT_ZSTD1_MAGICLESS)
        numbers, texts, frames, directory = _HEAD.unpack_from(data)
        at, count = _HEAD.size, numbers + texts + frames
        table = np.frombuffer(self._opened(data[at : at + directory], 4 * count), np.uint8)
        sizes = table.reshape(4, count).T.copy().view("<u4")[:, 0].tolist()
        at += directory
        self._sizes = sizes[:numbers]
        whole = [sum(sizes[numbers : numbers + texts])]
        whole += [sum(size for size in self._sizes if size < _SMALL)]
        whole += [size for size in self._sizes if size >= _SMALL]
        opened = []
        for stored, size in zip(sizes[numbers + texts :], whole, strict=True):
            opened.append(self._opened(data[at : at + stored], size))
            at += stored
        self._columns: list[list[bytes]] = []
        self._known_texts: list[bytes] = []
        self._known_numbers: list[int] = []
        self._text = iter(_cut(opened[0], sizes[numbers : numbers + texts]))
        small = iter(_cut(opened[1], [size for size in self._sizes if size < _SMALL]))
        large = iter(opened[2:])
        self._numbers = iter([next(small if size < _SMALL else large) for size in self._sizes])

    def _opened(self, data: bytes, size: int) -> bytes:
        result: bytes = self._zstd.decompress(data, max_output_size=size) if size else b""
        if len(result) != size:
            raise DataError("a frame is shorter than it says")
        return result

    def text(self) -> bytes:
        """The next text."""
        return next(self._text)

    def ints(self, n: int) -> Longs:
        """Numbers, n of them."""
        head = next(self._numbers)
        width, way = divmod(head[0], 8)
        lowest, at = _number(head, 1)
        first, _ = _number(head, at)
        planes = np.zeros((n, 8), np.uint8)
        if way == _ROWS and width:
            planes[:, :width] = np.frombuffer(next(self._numbers), np.uint8).reshape(n, width)
        else:
            for at in range(width):
                planes[:, at] = np.frombuffer(next(self._numbers), np.uint8)
        values: Longs = planes.view("<i8")[:, 0].astype(np.int64) + np.int64(lowest)
        return np.cumsum(values) + first if way == _DELTA_PLANES else values

    def texts(self, n: int) -> list[bytes]:
        """Texts, n of them."""
        kind = next(self._numbers)[0]
        if kind == _ONE:
            return [self.text()] * n
        if kind == _SAME:
            return self._columns[int(self.ints(1)[0])]
        result = self._several(kind, n)
        self._columns.append(result)
        return result

    def _several(self, kind: int, n: int) -> list[bytes]:
        if kind == _DICTIONARY:
            distinct = self.texts(int(self.ints(1)[0]))
            return [distinct[place] for place in self.ints(n).tolist()]
        if kind == _NUMBERS:
            skeletons = self.text().split(b"\n")
            kinds = self.ints(n)
            result = [b""] * n
            for at, skeleton in enumerate(skeletons):
                rows = np.flatnonzero(kinds == at).tolist()
                for row, value in zip(rows, self._of_numbers(skeleton, len(rows)), strict=True):
                    result[row] = value
            return result
        if kind == _TEXT:
            sizes = self.ints(n).tolist()
            return _cut(self.text(), sizes)
        new = int(self.ints(1)[0])
        ranks = self.ints(n).tolist()
        text = self.text()
        self._known_texts += text.split(b"\n") if new else []
        return [self._known_texts[rank] for rank in ranks]

    def _column(self, n: int, pooled: bool) -> Longs:
        if not pooled:
            return self.ints(n)
        new = int(self.ints(1)[0])
        ranks = self.ints(n).tolist()
        self._known_numbers += self.ints(new).tolist()
        return np.array([self._known_numbers[rank] for rank in ranks], np.int64)

    def _of_numbers(self, skeleton: bytes, n: int) -> list[bytes]:
        first, *others = skeleton.split(b"\0")
        runs = len(others)
        if not runs:
            return [first] * n
        both = self.ints(2 * runs).tolist()
        widths, radix = both[:runs], both[runs:]
        if radix[0] > 0:
            whole = self.ints(n)
            columns = []
            for unit in reversed(radix):
                columns.append(whole % unit)
                whole = whole // unit
            columns.reverse()
        else:
            columns = [self._column(n, unit == _KNOWN) for unit in radix]
        texts = [
            [b"%0*d" % (width, number) for number in column.tolist()]
            for width, column in zip(widths, columns, strict=True)
        ]
        return [
            first + b"".join(a + b for a, b in zip(row, others, strict=True))
            for row in zip(*texts, strict=True)
        ]


def zstd() -> Any:
    """The module of Zstandard."""
    return import_extra("zstandard", extra="fields", purpose="packing logs")


def _frame(module: Any, level: int) -> Any:
    settings = module.ZstdCompressionParameters.from_level(
        level,
        format=module.FORMAT_ZSTD1_MAGICLESS,
        write_content_size=False,
        write_checksum=False,
        write_dict_id=False,
    )
    return module.ZstdCompressor(compression_params=settings)


def _cut(text: bytes, sizes: Sequence[int]) -> list[bytes]:
    result, at = [], 0
    for size in sizes:
        result.append(text[at : at + size])
        at += size
    return result


class _Numbers(NamedTuple):
    """Values with the same text around their numbers.

    Args:
        rows: their places in the column.
        widths: digits of each number; 0 where none begins with a zero that is not all of it.
        columns: the numbers.
    """

    rows: list[int]
    widths: list[int]
    columns: list[Longs]


def _numbers(values: Sequence[bytes]) -> dict[bytes, _Numbers] | None:
    """Values by the text around their numbers; None where that is of too many kinds."""
    rows: dict[bytes, list[int]] = {}
    for row, value in enumerate(values):
        if b"\0" in value or b"\n" in value:
            return None
        rows.setdefault(_DIGITS.sub(b"\0", value), []).append(row)
        if _ALIKE * len(rows) > len(values) + _ALIKE:
            return None
    if all(b"\0" not in skeleton for skeleton in rows):
        return None
    groups = {}
    for skeleton, of_it in rows.items():
        widths, columns = [], []
        for column in zip(*(_DIGITS.findall(values[row]) for row in of_it), strict=True):
            sizes = {len(text) for text in column}
            leading = any(text[0] == 48 and len(text) > 1 for text in column)
            numbers = list(map(int, column)) if max(sizes) <= _MOST else [2**63]
            if max(numbers) >= 2**63 or (leading and len(sizes) > 1):
                return None
            widths.append(sizes.pop() if leading else 0)
            columns.append(np.array(numbers, np.int64))
        groups[skeleton] = _Numbers(of_it, widths, columns)
    return groups


def _varint(value: int) -> bytes:
    """Seven bits a byte, the sign in the lowest of the first."""
    value = 2 * value if value >= 0 else -2 * value - 1
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of :func:`_varint`, and what comes after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return (value >> 1 if not value & 1 else -(value >> 1) - 1), at


def _radix(columns: Sequence[Longs], widths: Sequence[int]) -> list[int]:
    """What makes one number of several, such as hours, minutes and seconds; empty if nothing does.

    Only where most steps of the whole go forward: of unrelated numbers nothing is won.
    """
    if len(columns) < 2 or len(columns[0]) < 2:
        return []
    units = []
    for column, width in zip(columns, widths, strict=True):
        highest = int(column.max()) + 1
        unit = next((one for one in _UNITS if highest <= one and width == 2), 0)
        units.append(unit or 10 ** max(width, len(str(highest - 1))))
    product, whole = 1, np.zeros(len(columns[0]), np.int64)
    for column, unit in zip(columns, units, strict=True):
        product *= unit
        if product > 2**62:
            return []
        whole = whole * unit + column
    return units if (np.diff(whole) >= 0).mean() > 0.9 else []
