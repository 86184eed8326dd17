"""The index of one rank's file: what lies where in it, with the checksum of every piece.

``rank-00000.json`` lies beside ``rank-00000.safetensors``. A rank writes it when its file is
durable, which is its vote for the checkpoint, and ``index.json`` holds the SHA-256 of it. Code that
needs no piece of a file never reads the file's shard.

It is JSON of four lines, so what is the same in every save is found without being parsed::

    {"rank": {"rank": 0, "file": {...}, "layout_sha256": "...", "phases_s": {...}, ...},
    "tensors": [[name, dtype, [shape]], ...],
    "pieces": [[tensor, start, offset ..., shape ...], ...],
    "checks": {"crc32c": [...], "keys": {"7": "name#2"}}}
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field, NonNegativeInt

from shoal.checkpoint.checksum import crc32c
from shoal.core.boxes import Box
from shoal.core.config import Value
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from shoal.checkpoint.image import ImageSlot

Digest = str
FILE = r"^rank-\d{5,}\.safetensors$"


def file_name(rank: int) -> str:
    """The file that holds the pieces of ``rank``."""
    return f"rank-{rank:05d}.safetensors"


def shard_name(rank: int) -> str:
    """The small file that says what lies in the file of ``rank``."""
    return f"rank-{rank:05d}.json"


def rank_of(file: str) -> int:
    """The rank whose pieces a file holds."""
    return int(file.partition(".")[0].removeprefix("rank-"))


class StoredFile(Value):
    """One file of tensors.

    Args:
        bytes: its size.
        header_sha256: checksum of everything before its first tensor.
        shard_sha256: checksum of its index; versions 1 to 3 have none.
    """

    bytes: NonNegativeInt
    header_sha256: Digest
    shard_sha256: Digest | None = None


class StoredPiece(Value):
    """One box of a tensor in a file.

    Args:
        offset: where the box begins in the whole tensor.
        shape: size of the box.
        crc32c: checksum of its bytes.
        sha256: checksum of its bytes in versions 1 and 2, which have no CRC32C.
        key: its name in the file, if that is not the tensor's: a rank may write several pieces
            of one tensor.
    """

    file: str = Field(pattern=FILE)
    offset: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]
    bytes: NonNegativeInt
    crc32c: int | None = Field(default=None, ge=0, lt=2**32)
    sha256: Digest | None = None
    key: str | None = None

    def holds(self, data: np.ndarray) -> bool:
        """Whether these are the bytes that were written."""
        if self.crc32c is not None:
            return crc32c(data) == self.crc32c
        return hashlib.sha256(data.data).hexdigest() == self.sha256

    @property
    def checksum(self) -> str:
        """What the bytes are compared by."""
        return "CRC32C" if self.crc32c is not None else "SHA-256"

    @property
    def box(self) -> Box:
        """The box of the whole tensor that this piece holds."""
        return Box(self.offset, self.shape)


class DeclaredTensor(NamedTuple):
    """A tensor as a rank describes it.

    Args:
        dtype: the format's name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class RankIndex(Value):
    """What one rank wrote, and how long that took.

    Args:
        layout_sha256: checksum of names, shapes and places, without those of the bytes.
        phases_s: phase -> seconds that its share of the save took.
        spans_s: phase -> when it began and ended, s after the save began.
    """

    rank: NonNegativeInt
    file: StoredFile
    layout_sha256: Digest
    phases_s: dict[str, float] = {}
    spans_s: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True, eq=False)
class FileIndex:
    """The index of one file.

    Args:
        head: what the rank says of itself.
        tensors: those that the file has pieces of.
        rows: int64 [N, 2 + 2 D] in the order of the file; of each piece the number of its tensor,
            its first byte in the file, offset and shape; D is the most dimensions of any tensor,
            and others have offset 0 and shape 1 in the last ones.
        keys: number of a piece -> its name in the file, where that is not the tensor's.
        sha256: of each piece, in versions that have no CRC32C.
    """

    head: RankIndex
    tensors: tuple[DeclaredTensor, ...]
    rows: np.ndarray
    crc32c: Sequence[int]
    keys: Mapping[int, str]
    sha256: Sequence[str] = ()

    @classmethod
    def of(
        cls, rank: int, file: StoredFile, slots: Sequence[ImageSlot], crc32c: Sequence[int]
    ) -> FileIndex:
        """The index of a file that was written."""
        numbers: dict[DeclaredTensor, int] = {}
        dims = max((len(slot.shape) for slot in slots), default=0)
        rows = np.ones((len(slots), 2 + 2 * dims), dtype=np.int64)
        rows[:, 2 : 2 + dims] = 0
        keys: dict[int, str] = {}
        for at, slot in enumerate(slots):
            declared = DeclaredTensor(slot.name, slot.dtype, slot.global_shape)
            own = len(slot.shape)
            rows[at, 0] = numbers.setdefault(declared, len(numbers))
            rows[at, 1] = slot.start
            rows[at, 2 : 2 + own] = slot.offset
            rows[at, 2 + dims : 2 + dims + own] = slot.shape
            if slot.key != slot.name:
                keys[at] = slot.key
        tensors = tuple(numbers)
        layout = hashlib.sha256(_lines(tensors, rows)).hexdigest()
        head = RankIndex(rank=rank, file=file, layout_sha256=layout)
        return cls(head, tensors, rows, crc32c, keys)

    @property
    def dims(self) -> int:
        """Most dimensions of any tensor."""
        return (int(self.rows.shape[1]) - 2) // 2

    def encode(self) -> bytes:
        """The bytes of the small file."""
        head = json.dumps(self.head.model_dump(mode="json", exclude_none=True))
        checks = json.dumps({"crc32c": list(self.crc32c), "keys": self.keys})
        return b'{"rank": %s,\n%s,\n"checks": %s}\n' % (
            head.encode(),
            _lines(self.tensors, self.rows),
            checks.encode(),
        )

    @classmethod
    def decode(cls, raw: bytes) -> FileIndex:
        """What :meth:`encode` gave.

        Raises:
            ValueError: it is something else.
        """
        head, tensors, pieces, checks = _split(raw)
        declared, extents = _declared(tensors)
        rows = _rows(pieces)
        table = json.loads(checks)
        known = cls(
            RankIndex.model_validate_json(head),
            declared,
            rows,
            table["crc32c"],
            {int(at): str(key) for at, key in table["keys"].items()},
        )
        flaw = known._flaw(extents)
        if flaw:
            raise ValueError(flaw)
        return known

    def _flaw(self, extents: np.ndarray) -> str:
        if len(self.crc32c) != len(self.rows):
            return "not one checksum for every piece"
        which, dims = self.rows[:, 0], self.dims
        if (self.rows < 0).any() or (which >= len(self.tensors)).any():
            return "a piece of no tensor"
        if extents.shape[1] > dims:
            return "a tensor of more dimensions than its pieces have"
        padded = np.ones((len(extents), dims), dtype=np.int64)
        padded[:, : extents.shape[1]] = extents
        ends = self.rows[:, 2 : 2 + dims] + self.rows[:, 2 + dims :]
        if (ends > padded[which]).any():
            return "a piece that is no box of its tensor"
        return ""

    def __len__(self) -> int:
        return len(self.rows)

    def piece(self, at: int) -> tuple[str, StoredPiece, int]:
        """Tensor, entry and first byte in the file of the piece of a number."""
        tensor, start, offset, shape = self._places[at]
        declared = self.tensors[tensor]
        size = ITEM_BYTES[declared.dtype] * Box(offset, shape).volume
        piece = StoredPiece.model_construct(
            file=self.file,
            offset=offset,
            shape=shape,
            bytes=size,
            crc32c=self.crc32c[at] if not self.sha256 else None,
            sha256=self.sha256[at] if self.sha256 else None,
            key=self.keys.get(at),
        )
        return declared.name, piece, start

    @property
    def file(self) -> str:
        """Name of the file."""
        return file_name(self.head.rank)

    def pieces(self) -> Iterator[tuple[str, StoredPiece, int]]:
        """:meth:`piece` of all, in the order of the file."""
        return map(self.piece, range(len(self.rows)))

    def number(self, name: str, box: Box) -> int | None:
        """Number of the piece that is a box of a tensor; None if the file has none."""
        return self._numbers.get((name, box.offset, box.shape))

    def boxes(self) -> Iterator[tuple[int, int, Box, int]]:
        """Number, number of the tensor, box and first byte of every piece."""
        for at, (tensor, start, offset, shape) in enumerate(self._places):
            yield at, tensor, Box(offset, shape), start

    @functools.cached_property
    def _places(self) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
        dims = self.dims
        lengths = [len(one.shape) for one in self.tensors]
        return [
            (
                row[0],
                row[1],
                tuple(row[2 : 2 + lengths[row[0]]]),
                tuple(row[2 + dims : 2 + dims + lengths[row[0]]]),
            )
            for row in self.rows.tolist()
        ]

    @functools.cached_property
    def _numbers(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]:
        return {
            (self.tensors[tensor].name, offset, shape): at
            for at, (tensor, _, offset, shape) in enumerate(self._places)
        }


def _lines(tensors: Sequence[DeclaredTensor], rows: np.ndarray) -> bytes:
    """What is the same in every save of a layout."""
    table = json.dumps([[name, dtype, list(shape)] for name, dtype, shape in tensors])
    return b'"tensors": %s,\n"pieces": %s' % (
        table.encode(),
        json.dumps(rows.tolist(), separators=(",", ":")).encode(),
    )


def _split(raw: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """The four values of a shard.

    Raises:
        ValueError: there are not four.
    """
    lines = raw.rstrip(b"\n").split(b"\n")
    leads = (b'{"rank": ', b'"tensors": ', b'"pieces": ', b'"checks": ')
    ends = (b",", b",", b",", b"}")
    if len(lines) != len(leads):
        raise ValueError(f"{len(lines)} lines where a shard has {len(leads)}")
    results = []
    for line, lead, end in zip(lines, leads, ends, strict=True):
        if not line.startswith(lead) or not line.endswith(end):
            raise ValueError(f"a line of a shard begins with {line[:12]!r} and not with {lead!r}")
        results.append(line[len(lead) : len(line) - 1])
    return results[0], results[1], results[2], results[3]


def layout_of(raw: bytes) -> tuple[RankIndex, str]:
    """What a rank says of itself, and the checksum of its layout as it is there.

    Raises:
        ValueError: these are not the bytes of a shard.
    """
    head, tensors, pieces, _ = _split(raw)
    result = hashlib.sha256(b'"tensors": %s,\n"pieces": %s' % (tensors, pieces)).hexdigest()
    return RankIndex.model_validate_json(head), result


@functools.lru_cache(maxsize=16)
def _declared(raw: bytes) -> tuple[tuple[DeclaredTensor, ...], np.ndarray]:
    """Tensors, and their shapes padded with ones: int64 [tensors, D].

    Ranks that share every tensor have the same table, which is parsed once.
    """
    table: Any = json.loads(raw)
    result = tuple(
        DeclaredTensor(str(name), str(dtype), tuple(shape)) for name, dtype, shape in table
    )
    dims = max((len(one.shape) for one in result), default=0)
    extents = np.ones((len(result), dims), dtype=np.int64)
    for at, one in enumerate(result):
        if one.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {one.name!r} has the unknown dtype {one.dtype!r}")
        if any(type(extent) is not int or not 0 <= extent < 2**62 for extent in one.shape):
            raise ValueError(f"tensor {one.name!r} has an impossible shape")
        extents[at, : len(one.shape)] = one.shape
    return result, extents


def _rows(raw: bytes) -> np.ndarray:
    """Int64 [N, 2 + 2 D]."""
    table = json.loads(raw)
    width = len(table[0]) if table else 2
    if width < 2 or width % 2:
        raise ValueError(f"pieces of {width} numbers")
    try:
        return np.array(table, dtype=np.int64).reshape(len(table), width)
    except (OverflowError, TypeError) as cause:
        raise ValueError("a number that is none, or beyond 64 bits") from cause
