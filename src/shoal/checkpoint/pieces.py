"""Pieces: the boxes of tensors that a rank holds and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from shoal.core.boxes import Box, flat_boxes
from shoal.core.errors import CheckpointError, require
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    import torch

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

# The other way round.
DTYPE_NAMES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}

# What weights can be converted to: the product's spelling -> torch's.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Every file of a checkpoint takes whole blocks of the disk.
_FILES_BYTES = 4 * 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that this rank holds and writes.

    Args:
        tensor: the elements of the box.
        global_shape: shape of the whole tensor.
        offset: where the box begins in it.
        volatile: it changes outside the optimizer's update, as running means do in the forward
            pass; no mode leaves it to be copied later.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    volatile: bool = False

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Piece:
        """A tensor that one rank holds completely."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @classmethod
    def flat(
        cls, tensor: torch.Tensor, global_shape: tuple[int, ...], start: int
    ) -> tuple[Piece, ...]:
        """What a flat buffer holds of a tensor: elements from ``start`` on, counted row by row.

        Args:
            tensor: the elements, of one dimension.
            global_shape: shape of the whole tensor.
            start: number of the first.
        """
        size = tensor.numel()
        pieces: list[Piece] = []
        at = 0
        for box in flat_boxes(tuple(global_shape), start, start + size):
            part = tensor[at : at + box.volume].view(box.shape)
            pieces.append(cls(part, tuple(global_shape), box.offset))
            at += box.volume
        return tuple(pieces)

    def copied(self) -> Piece:
        """The same box with a copy of its elements."""
        return replace(self, tensor=self.tensor.detach().clone())

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(tuple(self.offset), tuple(self.tensor.shape))


Given = Mapping[str, "Piece | torch.Tensor | Sequence[Piece]"]
"""Name of a tensor -> what a rank writes of it: a piece, all of it, or several pieces."""


class ReadyPiece(NamedTuple):
    """A piece that is ready to be written.

    Args:
        name: the whole tensor's name.
        dtype: the format's name of its dtype.
    """

    name: str
    piece: Piece
    dtype: str


def as_pieces(given: Given) -> dict[str, ReadyPiece]:
    """Name in the file -> piece, in the order in which they are written.

    The first piece of a tensor has the tensor's name there, others a number behind it.

    Raises:
        CheckpointError: a piece that cannot be stored; names it.
    """
    import torch

    names = {getattr(torch, theirs): ours for ours, theirs in TORCH_NAMES.items()}
    result: dict[str, ReadyPiece] = {}
    others: list[ReadyPiece] = []
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
            chosen = ReadyPiece(name, piece, names[piece.tensor.dtype])
            if piece is first:
                result[name] = chosen
            else:
                others.append(chosen)
    for chosen in others:
        number = 2
        while f"{chosen.name}#{number}" in result:
            number += 1
        result[f"{chosen.name}#{number}"] = chosen
    # Wide dtypes first, so that every tensor is aligned without gaps; then a weight beside its
    # optimizer state, which change together.
    return dict(
        sorted(
            result.items(),
            key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0].partition(".")[2], item[0]),
        )
    )


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


def payload_bytes(pieces: Mapping[str, ReadyPiece]) -> int:
    """Bytes that the files of a rank need, with a margin for headers and index."""
    return _FILES_BYTES + sum(
        math.prod(chosen.piece.tensor.shape) * ITEM_BYTES[chosen.dtype] + 1024 + 4 * len(key)
        for key, chosen in pieces.items()
    )
