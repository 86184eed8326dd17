"""The file of one rank before it exists: what lies where in it, and its checksums.

A safetensors file is a header and the tensors' bytes without gaps, so the whole file follows from
names, shapes and dtypes. Code that has its image in memory writes it in any chunks; checksums are
taken on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.checkpoint.checksum import crc32c
from shoal.checkpoint.shards import FileIndex, StoredFile, file_name
from shoal.core.safetensors_header import ITEM_BYTES, encode_header

if TYPE_CHECKING:
    import numpy as np
    import torch

    from shoal.checkpoint.pieces import ReadyPiece
    from shoal.checkpoint.storage import Draft

Chunk = tuple[int, "np.ndarray"]
"""Where some bytes of a file begin, and the bytes: uint8 of one dimension."""


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """Where a piece lies in the file.

    Args:
        key: its name in the file.
        name: the whole tensor's name.
        dtype: the format's name.
        global_shape: the whole tensor's shape.
        offset: where the piece begins in it.
        shape: size of the piece.
        start: first byte in the file.
        stop: one past the last.
    """

    key: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Image:
    """What the file of a rank will hold.

    Args:
        header: the bytes before the first tensor.
        slots: the pieces, in the order of the file.
        size: bytes of the file.
    """

    header: bytes
    slots: tuple[ImageSlot, ...]
    size: int

    def index(self, rank: int, checksums: Mapping[str, int]) -> FileIndex:
        """What the rank reports when its file is written."""
        stored = StoredFile(bytes=self.size, header_sha256=hashlib.sha256(self.header).hexdigest())
        return FileIndex.of(rank, stored, self.slots, [checksums[slot.key] for slot in self.slots])


def image_of(pieces: Mapping[str, ReadyPiece]) -> Image:
    """The file that holds the pieces in their order."""
    header = encode_header({key: (c.dtype, c.piece.box.shape) for key, c in pieces.items()})
    at = len(header)
    slots: list[ImageSlot] = []
    for key, (name, piece, dtype) in pieces.items():
        size = piece.box.volume * ITEM_BYTES[dtype]
        box = piece.box
        slots.append(
            ImageSlot(
                key, name, dtype, tuple(piece.global_shape), box.offset, box.shape, at, at + size
            )
        )
        at += size
    return Image(header, tuple(slots), at)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes; a view where it is contiguous in host memory."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: np.ndarray = flat.view(torch.uint8).numpy()
    return array


def write_image(
    draft: Draft,
    rank: int,
    image: Image,
    chunks: Iterable[Chunk],
    checksums: Mapping[str, int] | None = None,
) -> FileIndex:
    """Write the file of one rank, and return when it is durable.

    Args:
        draft: the checkpoint being written.
        rank: whose file it is.
        image: what it holds.
        chunks: the file from its first byte to its last, without gaps.
        checksums: key -> CRC32C, there when the last chunk was given; taken of the chunks if not
            given.

    Raises:
        OSError: the file system refuses.
    """
    sink = draft.create(file_name(rank), image.size)
    taken = {slot.key: 0 for slot in image.slots}
    waiting = iter(image.slots if checksums is None else ())
    slot = next(waiting, None)
    try:
        for at, data in chunks:
            end = at + len(data)
            while slot is not None and slot.start < end:
                low, high = max(slot.start, at), min(slot.stop, end)
                taken[slot.key] = crc32c(data[low - at : high - at], taken[slot.key])
                if slot.stop > end:
                    break
                slot = next(waiting, None)
            sink.write(at, data)
        sink.finish()
    except BaseException:
        sink.abandon()
        raise
    return image.index(rank, taken if checksums is None else checksums)
