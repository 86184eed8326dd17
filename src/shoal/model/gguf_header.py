"""The header of a GGUF file, read with suspicion.

A GGUF file is a magic word, a version, counts, keys with values, and the names, shapes and
offsets of tensors; then, aligned, their bytes. Every count and length is held against what
is left of the file before anything is allocated: a file of one kilobyte that claims 10^12
elements costs one kilobyte.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (2023).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shoal.core.errors import ModelError

# Type number -> its name, elements of a block, bytes of a block.
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}

# Those that are known and not read, for messages.
_OTHERS = {
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
}

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTED = 2
# Keys, values and names of the largest open models are below 20 MB.
_MAX_HEADER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies in its file.

    Args:
        kind: its type, such as ``Q4_K``.
        start: first byte, counted from the start of the file.
        stop: one past the last byte.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A header that agrees with its file.

    Args:
        values: key -> number, text, truth or list.
        tensors: name -> place.
    """

    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _BadFileError(Exception):
    """What is wrong with the file."""


class _Reader:
    """Reads forward and never past what there is."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = min(size, _MAX_HEADER_BYTES)

    def take(self, count: int, what: str) -> bytes:
        if count > self._left:
            raise _BadFileError(f"{what} claims {count} bytes and at most {self._left} are left")
        self._left -= count
        result = self._file.read(count)
        if len(result) != count:
            raise _BadFileError(f"{what} is cut")
        return result

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, least: int, what: str) -> int:
        """A number of things of at least ``least`` bytes each, all of which must follow."""
        number: int = self.number("<Q", what)
        if number * least > self._left:
            raise _BadFileError(
                f"{what} claims {number} entries of at least {least} bytes and {self._left} bytes "
                "are left"
            )
        return number

    def text(self, what: str) -> str:
        # Vocabularies of some models hold pieces of characters.
        return self.take(self.count(1, what), what).decode("utf-8", "replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth >= _MAX_NESTED:
            raise _BadFileError(f"{what} is of the unknown type {kind}")
        inner: int = self.number("<I", what)
        if inner in _SCALARS:
            form = _SCALARS[inner]
            size = struct.calcsize(form)
            count = self.count(size, what)
            return list(struct.unpack(f"<{count}{form[1]}", self.take(count * size, what)))
        return [self.value(inner, what, depth + 1) for _ in range(self.count(8, what))]

    @property
    def place(self) -> int:
        return self._file.tell()


def read_header(path: Path) -> GgufHeader:
    """Read the header of ``path`` and hold it against the size of the file.

    Raises:
        ModelError: the file is missing, cut or no GGUF file, claims bytes that it does not
            have, or holds types that are not read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _read(file, size)
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    except _BadFileError as cause:
        raise ModelError(
            f"{path}: {cause}; it is truncated, damaged or not a GGUF file; fetch it again"
        ) from None


def _read(file: IO[bytes], size: int) -> GgufHeader:
    reader = _Reader(file, size)
    if size < 24 or reader.take(4, "its magic number") != b"GGUF":
        raise _BadFileError("it does not begin with GGUF")
    version = reader.number("<I", "its version")
    if version not in (2, 3):
        raise _BadFileError(f"its version is {version}, and 2 and 3 are read")
    num_tensors = reader.count(24, "the number of tensors")
    num_values = reader.count(13, "the number of keys")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.text("a key")
        if key in values:
            raise _BadFileError(f"the key {key[:60]!r} stands twice")
        what = f"the value of {key[:60]!r}"
        values[key] = reader.value(reader.number("<I", what), what)
    entries = [_entry(reader) for _ in range(num_tensors)]
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 1 <= align <= 2**16 or align & (align - 1):
        raise _BadFileError(f"general.alignment is {align!r}, no power of two up to 65536")
    base = -(-reader.place // align) * align
    tensors: dict[str, GgufTensor] = {}
    end = base
    for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
        if name in tensors:
            raise _BadFileError(f"tensor {name[:60]!r} stands twice")
        if kind not in BLOCKS:
            raise _BadFileError(
                f"tensor {name[:60]!r} is of type {_OTHERS.get(kind, kind)}, and "
                f"{', '.join(block[0] for block in BLOCKS.values())} are read"
            )
        label, block, block_bytes = BLOCKS[kind]
        count = math.prod(shape)
        if not shape or shape[-1] % block:
            raise _BadFileError(
                f"tensor {name[:60]!r} of {label} has rows that are no multiple of {block}"
            )
        start = base + offset
        stop = start + count // block * block_bytes
        if offset % align or start < end:
            raise _BadFileError(f"tensor {name[:60]!r} lies over the one before, or is not aligned")
        if stop > size:
            raise _BadFileError(
                f"tensor {name[:60]!r} claims {count} elements up to byte {stop}, and the file "
                f"has {size}"
            )
        tensors[name] = GgufTensor(name, label, shape, start, stop)
        end = stop
    return GgufHeader(values, tensors)


def _entry(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    name = reader.text("the name of a tensor")
    what = f"tensor {name[:60]!r}"
    dims = reader.number("<I", what)
    if dims > _MAX_DIMS:
        raise _BadFileError(f"{what} has {dims} dimensions")
    shape = tuple(reader.number("<Q", what) for _ in range(dims))
    return name, reader.number("<I", what), shape[::-1], reader.number("<Q", what)
