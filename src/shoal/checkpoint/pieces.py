"""Pieces of tensors, and writing them as one safetensors file, hashed on the way.

Nothing is copied that is contiguous in host memory already: each piece is hashed
and written straight out of the tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.boxes import Box
from shoal.checkpoint.index import Part, RankIndex, StoredFile, StoredPiece, file_name
from shoal.core.errors import CheckpointError, require
from shoal.core.safetensors_header import ITEM_BYTES, encode_header

if TYPE_CHECKING:
    import torch

__all__ = ["TORCH_NAMES", "Piece", "write_pieces"]

# safetensors' names of the dtypes -> torch's.
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}

# Linux writes at most this much in one call.
_CHUNK_BYTES = 2**30
# Every file of a checkpoint takes whole blocks of the disk.
_FILES_BYTES = 4 * 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank holds and writes.

    Args:
        tensor: the elements of the box.
        global_shape: shape of the whole tensor.
        offset: where the box begins in it.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Piece:
        """A tensor that one rank holds completely."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


def as_pieces(given: Mapping[str, Piece | torch.Tensor]) -> dict[str, tuple[Piece, str]]:
    """Name -> (piece, dtype name), in the order in which they are written.

    Raises:
        CheckpointError: a piece that cannot be stored; names it.
    """
    import torch

    names = {getattr(torch, theirs): ours for ours, theirs in TORCH_NAMES.items()}
    found: dict[str, tuple[Piece, str]] = {}
    for name, value in given.items():
        piece = Piece.whole(value) if isinstance(value, torch.Tensor) else value
        where = f"tensor {name!r}"
        require(
            name not in ("", "__metadata__"),
            "name",
            name,
            expected="a name of a tensor",
            error=CheckpointError,
        )
        require(
            piece.tensor.dtype in names,
            f"{where}.dtype",
            str(piece.tensor.dtype),
            expected=f"one of {', '.join(TORCH_NAMES.values())}",
            error=CheckpointError,
        )
        require(
            not hasattr(piece.tensor, "to_local"),
            where,
            type(piece.tensor).__name__,
            expected="the local part of a distributed tensor",
            hint="give a Piece of to_local() with its offset",
            error=CheckpointError,
        )
        require(
            piece.tensor.layout == torch.strided and piece.tensor.device.type != "meta",
            where,
            f"{piece.tensor.layout} on {piece.tensor.device}",
            expected="a dense tensor that has values",
            error=CheckpointError,
        )
        require(
            piece.box.inside(tuple(piece.global_shape)),
            where,
            str(piece.box),
            expected=f"a box of the whole shape {list(piece.global_shape)}",
            error=CheckpointError,
        )
        found[name] = (piece, names[piece.tensor.dtype])
    # Wide dtypes first, so that every tensor is aligned without gaps.
    return dict(sorted(found.items(), key=lambda item: (-ITEM_BYTES[item[1][1]], item[0])))


def payload_bytes(pieces: Mapping[str, tuple[Piece, str]]) -> int:
    """Bytes that :func:`write_pieces` needs, with a margin for headers and index."""
    return _FILES_BYTES + sum(
        math.prod(piece.tensor.shape) * ITEM_BYTES[dtype] + 1024 + 4 * len(name)
        for name, (piece, dtype) in pieces.items()
    )


def write_pieces(folder: Path, rank: int, pieces: Mapping[str, tuple[Piece, str]]) -> RankIndex:
    """Write the file of one rank and flush it to the disk.

    Raises:
        OSError: the file system refuses.
    """
    header = encode_header({n: (dtype, p.box.shape) for n, (p, dtype) in pieces.items()})
    parts: dict[str, Part] = {}
    size = len(header)
    fd = os.open(folder / file_name(rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        _write_all(fd, memoryview(header))
        for name, (piece, dtype) in pieces.items():
            view = _bytes_of(piece.tensor)
            parts[name] = Part(
                dtype=dtype,
                global_shape=tuple(piece.global_shape),
                piece=StoredPiece(
                    file=file_name(rank),
                    offset=piece.box.offset,
                    shape=piece.box.shape,
                    bytes=len(view),
                    sha256=hashlib.sha256(view).hexdigest(),
                ),
            )
            _write_all(fd, view)
            size += len(view)
        os.fsync(fd)
    finally:
        os.close(fd)
    stored = StoredFile(bytes=size, header_sha256=hashlib.sha256(header).hexdigest())
    return RankIndex(rank=rank, file=stored, parts=parts)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view[:_CHUNK_BYTES]) :]
