"""The header of a safetensors file, read with suspicion.

A safetensors file is eight bytes of header length, a JSON header, and the tensors'
bytes without gaps. The file itself states its sizes; here every
claim is held against the size of the file before anything is allocated, so a file
of one kilobyte that claims 10^12 elements costs one kilobyte.

Format: https://github.com/huggingface/safetensors (2022), section "Format".
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ModelError, ShoalError

# Bytes of one element, by the format's own names.
ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# The format's own limit; the header of the largest open models is below 1 MB.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in its file.

    Args:
        name: its key in the header.
        dtype: the format's name, such as ``BF16``.
        shape: its sizes.
        start: first byte, counted from the start of the file.
        stop: one past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A header that agrees with its file.

    Args:
        tensors: name -> place.
        metadata: the file's free text entries.
        num_bytes: bytes before the first tensor, the length field included.
        raw: those bytes, for a checksum.
    """

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    num_bytes: int
    raw: bytes


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The bytes before the first tensor of a file that holds ``tensors`` in this order.

    Args:
        tensors: name -> (dtype name, shape).
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned for every dtype
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path, *, error: type[ShoalError] = ModelError) -> Header:
    """Read the header of ``path`` and hold it against the size of the file.

    Raises:
        ShoalError: of class ``error``: the file is missing or cut, or its header is no
            JSON, names an unknown dtype, or claims bytes that the file does not have.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            return read_header_from(read, size, str(path), error=error)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause})") from cause


def read_header_from(
    read: Callable[[int, int], bytes],
    size: int,
    path: str,
    *,
    error: type[ShoalError] = ModelError,
) -> Header:
    """The same of a file that lies anywhere.

    Args:
        read: bytes from a first to before a last one.
        size: of the whole file.
        path: what errors call it.
        error: their class.

    Raises:
        ShoalError: as of :func:`read_header`.
    """
    lead = read(0, min(8, size))
    if len(lead) < 8:
        raise error(f"{path}: {size} bytes are too few for a safetensors file; copy it again")
    (length,) = struct.unpack("<Q", lead)
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise error(
            f"{path}: its header claims {length} bytes, of at most "
            f"{min(size - 8, MAX_HEADER_BYTES)} possible in a file of {size}; "
            "it is truncated, damaged or not a safetensors file; copy it again"
        )
    text = read(8, 8 + length)
    try:
        table = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as cause:
        raise error(
            f"{path}: its header is not JSON ({type(cause).__name__}); "
            "it is damaged or not a safetensors file; copy it again"
        ) from cause
    try:
        tensors, metadata = _check(table, 8 + length, size)
    except ValueError as cause:
        raise error(f"{path}: {cause}; it is damaged or manipulated; copy it again") from cause
    return Header(tensors, metadata, 8 + length, lead + text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _check(table: Any, base: int, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    if not isinstance(table, dict):
        raise ValueError("its header is not a mapping")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not a mapping to text")
    tensors = {name: _tensor(name, entry, base) for name, entry in table.items()}
    expected = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != expected:
            raise ValueError(f"tensor {tensor.name!r} does not start where the last one ends")
        expected = tensor.stop
    if expected != size:
        raise ValueError(f"its tensors claim {expected - base} bytes and it holds {size - base}")
    return tensors, metadata


def _tensor(name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"tensor {name!r} needs dtype, shape and data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {name!r} has no usable shape")
    if not _counts(span) or len(span) != 2:
        raise ValueError(f"tensor {name!r} has no usable data_offsets")
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if needed != span[1] - span[0]:
        raise ValueError(
            f"tensor {name!r} of {math.prod(shape)} {dtype} elements needs {needed} bytes "
            f"and is given {span[1] - span[0]}"
        )
    return StoredTensor(name, dtype, tuple(shape), base + span[0], base + span[1])


def _counts(value: Any) -> bool:
    # type() and not isinstance: true is no count. 2^63 is what any reader can address.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
