"""Checkpoints of versions 1 to 3, which have all pieces in ``index.json`` and no shards.

Headers of all files are read when one is opened, since they alone say where its pieces lie.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.checkpoint.index import CheckpointIndex, IndexedTensor, digest, flaw_of, require_size
from shoal.checkpoint.runs import BoxRuns, OwnedBox
from shoal.checkpoint.shards import (
    FILE,
    DeclaredTensor,
    FileIndex,
    RankIndex,
    StoredFile,
    StoredPiece,
    rank_of,
)
from shoal.core.config import Value
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.safetensors_header import ITEM_BYTES, StoredTensor, read_header_from

if TYPE_CHECKING:
    from shoal.checkpoint.storage import Folder


class LegacyTensor(Value):
    """One whole tensor and its pieces.

    Args:
        dtype: the format's name, such as ``BF16``.
        shape: its global shape.
        pieces: boxes that cover it; some may hold the same elements.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    pieces: tuple[StoredPiece, ...]


class LegacyIndex(Value):
    """``index.json`` of versions 1 to 3; see :class:`~shoal.checkpoint.index.CheckpointIndex`."""

    format: Literal["shoal-checkpoint"] = "shoal-checkpoint"
    version: Literal[1, 2, 3] = 3
    step: NonNegativeInt
    world: PositiveInt
    meta: dict[str, Any]
    meta_sha256: str
    files: dict[Annotated[str, Field(pattern=FILE)], StoredFile]
    tensors: dict[str, LegacyTensor]

    def flaw(self) -> str:
        """What makes the pieces impossible, or an empty text."""
        if self.meta_sha256 != digest(self.meta):
            return "meta has changed since it was written"
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
        return ""


def opened(plain: LegacyIndex, folder: Folder, raw: bytes) -> CheckpointIndex:
    """The index of an old checkpoint, its files checked.

    Raises:
        CheckpointError: a file cannot be read.
        CorruptError: the index, a header or the size of a file has changed since it was written.
    """
    path = folder.where("index.json")
    flaw = plain.flaw()
    if flaw:
        raise CorruptError(f"{path}: {flaw}")
    tensors = {
        name: IndexedTensor(
            one.dtype,
            one.shape,
            BoxRuns.of_boxes(
                [OwnedBox(rank_of(p.file), p.box) for p in one.pieces], len(one.shape)
            ),
        )
        for name, one in plain.tensors.items()
    }
    flaw = flaw_of(tensors, 1 + max(map(rank_of, plain.files), default=0))
    if flaw:
        raise CorruptError(f"{path}: {flaw}")
    held: dict[str, list[tuple[str, StoredPiece]]] = {file: [] for file in plain.files}
    for name, one in plain.tensors.items():
        for piece in one.pieces:
            held[piece.file].append((name, piece))
    shards = {}
    for file, pieces in held.items():
        header = _header(folder, file, plain.files[file])
        shards[file] = _shard(folder.where(file), plain, file, pieces, header)
    return CheckpointIndex(
        step=plain.step,
        world=plain.world,
        meta=plain.meta,
        files=plain.files,
        tensors=tensors,
        raw=raw,
        version=plain.version,
        folder=folder,
        shards=shards,
        checked=set(shards),
    )


def _header(folder: Folder, file: str, stored: StoredFile) -> dict[str, StoredTensor]:
    path = folder.where(file)
    require_size(folder, file, stored.bytes)
    try:
        header = read_header_from(
            lambda start, stop: folder.read(file, start, stop).tobytes(),
            stored.bytes,
            path,
            error=CorruptError,
        )
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    if hashlib.sha256(header.raw).hexdigest() != stored.header_sha256:
        raise CorruptError(f"{path}: its header has changed since it was written (SHA-256 differs)")
    return header.tensors


def _shard(
    path: str,
    plain: LegacyIndex,
    file: str,
    pieces: list[tuple[str, StoredPiece]],
    header: dict[str, StoredTensor],
) -> FileIndex:
    """What an index and a header say of a file, in its order."""
    numbers: dict[DeclaredTensor, int] = {}
    results = []
    for name, piece in pieces:
        tensor, place = plain.tensors[name], header.get(piece.key or name)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, piece.shape):
            raise CorruptError(
                f"{path}: tensor {piece.key or name!r} is not there as the index says"
            )
        declared = DeclaredTensor(name, tensor.dtype, tensor.shape)
        results.append((place.start, numbers.setdefault(declared, len(numbers)), piece))
    results.sort(key=lambda one: (one[0], one[0] + one[2].bytes))
    dims = max((len(piece.shape) for _, _, piece in results), default=0)
    rows = np.array(
        [
            [
                *(number, start),
                *(*piece.offset, *(0,) * (dims - len(piece.shape))),
                *(*piece.shape, *(1,) * (dims - len(piece.shape))),
            ]
            for start, number, piece in results
        ],
        dtype=np.int64,
    ).reshape(len(results), 2 + 2 * dims)
    return FileIndex(
        RankIndex(rank=rank_of(file), file=plain.files[file], layout_sha256=""),
        tuple(numbers),
        rows,
        [piece.crc32c or 0 for _, _, piece in results],
        {at: piece.key for at, (_, _, piece) in enumerate(results) if piece.key is not None},
        [piece.sha256 for _, _, piece in results if piece.sha256 is not None],
    )
