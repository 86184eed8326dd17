"""The index of a checkpoint: which piece of which tensor lies where, and its checksum.

``index.json`` begins with the SHA-256 of all that follows in it, so the index that
vouches for every other byte is itself vouched for::

    {"sha256": "<64 hex digits>",
     "format": "shoal-checkpoint", "version": 3, ...}
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from shoal.checkpoint.checksum import crc32c
from shoal.core.boxes import Box, uncovered
from shoal.core.config import Value
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    import numpy as np

    from shoal.checkpoint.storage import Folder

__all__ = [
    "FORMAT_VERSION",
    "INDEX_NAME",
    "Index",
    "Part",
    "RankIndex",
    "StoredFile",
    "StoredPiece",
    "Tensor",
    "file_name",
    "merge",
    "read_index",
]

# Version 2 added the key of a piece; version 3 has CRC32C for SHA-256 of pieces.
FORMAT_VERSION = 3
INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 2**30

_LEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_LEAD_BYTES = len('{"sha256": "') + 64 + len('",\n')
_FILE = r"^rank-\d{5,}\.safetensors$"

Digest = str


def file_name(rank: int) -> str:
    """The file that holds the pieces of ``rank``."""
    return f"rank-{rank:05d}.safetensors"


def digest(value: Any) -> Digest:
    """SHA-256 of plain data, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class StoredFile(Value):
    """One file of tensors.

    Args:
        bytes: its size.
        header_sha256: checksum of everything before its first tensor.
    """

    bytes: NonNegativeInt
    header_sha256: Digest


class StoredPiece(Value):
    """One box of a tensor in a file.

    Args:
        file: name of the file.
        offset: where the box begins in the whole tensor.
        shape: size of the box.
        bytes: its size.
        crc32c: checksum of its bytes.
        sha256: checksum of its bytes in versions 1 and 2, which have no CRC32C.
        key: its name in the file, if that is not the tensor's: a rank may write several pieces
            of one tensor.
    """

    file: str = Field(pattern=_FILE)
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


class Tensor(Value):
    """One whole tensor and the pieces that make it up.

    Args:
        dtype: the format's name, such as ``BF16``.
        shape: its global shape.
        pieces: boxes that cover it; some may hold the same elements.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[StoredPiece, ...]


class Part(Value):
    """One piece as its rank describes it, before the indexes are merged."""

    name: str
    dtype: str
    global_shape: tuple[NonNegativeInt, ...]
    piece: StoredPiece


class RankIndex(Value):
    """What one rank wrote.

    Args:
        rank: its number.
        file: its file.
        parts: its pieces.
        phases_s: phase -> seconds that its share of the save took.
        spans_s: phase -> when it began and ended, s after the save began.
    """

    rank: NonNegativeInt
    file: StoredFile
    parts: tuple[Part, ...]
    phases_s: dict[str, float] = {}
    spans_s: dict[str, tuple[float, float]] = {}


class Index(Value):
    """What a whole checkpoint holds.

    Args:
        format: the name of the format.
        version: its version.
        step: the step after which it was saved.
        world: ranks that wrote it.
        meta: what the caller wanted kept beside the tensors.
        meta_sha256: checksum of ``meta``, equal for equal content.
        files: name -> size and checksum of the header.
        tensors: name -> tensor.
    """

    format: Literal["shoal-checkpoint"] = "shoal-checkpoint"
    version: Literal[1, 2, 3] = 3
    step: NonNegativeInt
    world: PositiveInt
    meta: dict[str, Any]
    meta_sha256: Digest
    files: dict[Annotated[str, Field(pattern=_FILE)], StoredFile]
    tensors: dict[str, Tensor]

    def encode(self) -> bytes:
        """The bytes of ``index.json``."""
        table = self.model_dump()
        for tensor in table["tensors"].values():
            for piece in tensor["pieces"]:
                for key in ("crc32c", "sha256", "key"):
                    if piece[key] is None:
                        del piece[key]
        text = json.dumps(table, ensure_ascii=True, allow_nan=False)
        body = text.encode()[1:]
        return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body

    def flaw(self) -> str:
        """What makes this index impossible, or an empty text.

        The pieces of a tensor must be boxes of it and cover it, which bounds every
        later allocation by the size of the files.
        """
        if self.meta_sha256 != digest(self.meta):
            return "meta is not what was written"
        for name, tensor in self.tensors.items():
            if tensor.dtype not in ITEM_BYTES:
                return f"tensor {name!r} has the unknown dtype {tensor.dtype!r}"
            for piece in tensor.pieces:
                if piece.file not in self.files:
                    return f"tensor {name!r} lies in {piece.file}, which the index does not list"
                if (piece.crc32c is None) == (piece.sha256 is None):
                    return f"tensor {name!r}: a piece in {piece.file} needs one checksum"
                if not piece.box.inside(tensor.shape):
                    return (
                        f"tensor {name!r}: the piece {piece.box} of {piece.file} is no box "
                        f"of shape {list(tensor.shape)}"
                    )
                if piece.bytes != piece.box.volume * ITEM_BYTES[tensor.dtype]:
                    return f"tensor {name!r}: {piece.bytes} bytes cannot be {piece.box}"
            missing = uncovered(Box.whole(tensor.shape), (p.box for p in tensor.pieces))
            if missing:
                return f"tensor {name!r}: nobody holds the elements {missing[0]}"
        return ""


def merge(step: int, meta: dict[str, Any], ranks: list[RankIndex]) -> Index:
    """One index out of what the ranks wrote.

    Raises:
        CheckpointError: two ranks disagree about a tensor, or nobody wrote a part of it.
    """
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    for one in ranks:
        for part in one.parts:
            name = part.name
            known = tensors.setdefault(
                name, Tensor(dtype=part.dtype, shape=part.global_shape, pieces=())
            )
            pieces.setdefault(name, []).append(part.piece)
            if (known.dtype, known.shape) != (part.dtype, part.global_shape):
                raise CheckpointError(
                    f"tensor {name!r}: rank {one.rank} gives {part.dtype} "
                    f"{list(part.global_shape)}, an earlier rank {known.dtype} "
                    f"{list(known.shape)}; all ranks must name the same whole tensor"
                )
    index = Index(
        step=step,
        world=len(ranks),
        meta=meta,
        meta_sha256=digest(meta),
        files={file_name(one.rank): one.file for one in ranks},
        tensors={
            name: tensor.model_copy(update={"pieces": tuple(pieces[name])})
            for name, tensor in tensors.items()
        },
    )
    flaw = index.flaw()
    if flaw:
        raise CheckpointError(f"step {step}: {flaw}; save every element of every tensor once")
    return index


def read_index(folder: Folder) -> Index:
    """Read and check ``index.json``.

    Raises:
        CheckpointError: it is missing, or of a newer version of the format.
        CorruptError: its bytes are not those that were written.
    """
    path = folder.where(INDEX_NAME)
    try:
        size = folder.size(INDEX_NAME)
        if size > MAX_INDEX_BYTES:
            raise CorruptError(f"{path}: larger than {MAX_INDEX_BYTES} bytes; that is no index")
        raw = folder.read(INDEX_NAME, 0, size).tobytes()
    except FileNotFoundError as cause:
        raise CorruptError(f"{path}: missing; this is no complete checkpoint") from cause
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    lead = _LEAD.match(raw)
    if lead is None:
        raise CorruptError(f"{path}: does not begin with its checksum; it is damaged or foreign")
    body = memoryview(raw)[_LEAD_BYTES:]
    if hashlib.sha256(body).hexdigest().encode() != lead.group(1):
        raise CorruptError(f"{path}: its bytes are not those that were written (SHA-256 differs)")
    try:
        table = json.loads(b"{" + bytes(body))
    except (ValueError, RecursionError) as cause:
        raise CorruptError(f"{path}: not JSON ({type(cause).__name__})") from cause
    if not isinstance(table, dict) or table.get("format") != "shoal-checkpoint":
        raise CorruptError(f"{path}: not the index of a Shoal checkpoint")
    version = table.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written in version {version} of the format; this Shoal reads up to "
            f"{FORMAT_VERSION}; install a newer one"
        )
    try:
        index = Index.model_validate(table)
    except (ValidationError, RecursionError) as cause:
        where = ""
        if isinstance(cause, ValidationError):
            first = cause.errors(include_url=False)[0]
            where = f" ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise CorruptError(f"{path}: not a possible index{where}") from cause
    flaw = index.flaw()
    if flaw:
        raise CorruptError(f"{path}: {flaw}")
    return index
