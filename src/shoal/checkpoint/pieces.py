"""Pieces of tensors, and writing them as one safetensors file, hashed on the way.

Nothing is copied that is contiguous in host memory already: each piece is hashed
and written straight out of the tensor.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.index import Part, RankIndex, StoredFile, StoredPiece, file_name
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, require
from shoal.core.safetensors_header import ITEM_BYTES, encode_header

if TYPE_CHECKING:
    import torch

__all__ = ["TORCH_NAMES", "Chosen", "Given", "Piece", "write_pieces"]

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


Given = Mapping[str, "Piece | torch.Tensor | Sequence[Piece]"]
"""Name of a tensor -> what a rank writes of it: a piece, all of it, or several pieces."""


class Chosen(NamedTuple):
    """A piece that is ready to be written.

    Args:
        name: the whole tensor's name.
        piece: the box.
        dtype: the format's name of its dtype.
    """

    name: str
    piece: Piece
    dtype: str


def as_pieces(given: Given) -> dict[str, Chosen]:
    """Name in the file -> piece, in the order in which they are written.

    The first piece of a tensor has the tensor's name there, others a number behind it.

    Raises:
        CheckpointError: a piece that cannot be stored; names it.
    """
    import torch

    names = {getattr(torch, theirs): ours for ours, theirs in TORCH_NAMES.items()}
    found: dict[str, Chosen] = {}
    others: list[Chosen] = []
    for name, value in given.items():
        require(
            name not in ("", "__metadata__"),
            "name",
            name,
            expected="a name of a tensor",
            error=CheckpointError,
        )
        several = [value] if isinstance(value, (Piece, torch.Tensor)) else list(value)
        pieces = [Piece.whole(one) if isinstance(one, torch.Tensor) else one for one in several]
        for piece in pieces:
            _check(name, piece, names)
            first = pieces[0]
            require(
                (piece.tensor.dtype, tuple(piece.global_shape))
                == (first.tensor.dtype, tuple(first.global_shape)),
                f"tensor {name!r}",
                f"{piece.tensor.dtype} {list(piece.global_shape)}",
                expected=f"{first.tensor.dtype} {list(first.global_shape)} as of its first piece",
                error=CheckpointError,
            )
            chosen = Chosen(name, piece, names[piece.tensor.dtype])
            if piece is first:
                found[name] = chosen
            else:
                others.append(chosen)
    for chosen in others:
        number = 2
        while f"{chosen.name}#{number}" in found:
            number += 1
        found[f"{chosen.name}#{number}"] = chosen
    # Wide dtypes first, so that every tensor is aligned without gaps.
    return dict(sorted(found.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0])))


def _check(name: str, piece: Piece, names: Mapping[torch.dtype, str]) -> None:
    """Refuse what cannot be stored."""
    import torch

    where = f"tensor {name!r}"
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


def payload_bytes(pieces: Mapping[str, Chosen]) -> int:
    """Bytes that :func:`write_pieces` needs, with a margin for headers and index."""
    return _FILES_BYTES + sum(
        math.prod(chosen.piece.tensor.shape) * ITEM_BYTES[chosen.dtype] + 1024 + 4 * len(key)
        for key, chosen in pieces.items()
    )


def write_pieces(folder: Path, rank: int, pieces: Mapping[str, Chosen]) -> RankIndex:
    """Write the file of one rank and flush it to the disk.

    Raises:
        OSError: the file system refuses.
    """
    header = encode_header({key: (c.dtype, c.piece.box.shape) for key, c in pieces.items()})
    parts: list[Part] = []
    size = len(header)
    fd = os.open(folder / file_name(rank), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        _write_all(fd, memoryview(header))
        for key, (name, piece, dtype) in pieces.items():
            view = _bytes_of(piece.tensor)
            stored_piece = StoredPiece(
                file=file_name(rank),
                offset=piece.box.offset,
                shape=piece.box.shape,
                bytes=len(view),
                sha256=hashlib.sha256(view).hexdigest(),
                key=None if key == name else key,
            )
            parts.append(
                Part(
                    name=name,
                    dtype=dtype,
                    global_shape=tuple(piece.global_shape),
                    piece=stored_piece,
                )
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
