"""From tensors to the bytes of a file, a chunk at a time."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.checkpoint.checksum import copy_crc32c, crc32c
from shoal.checkpoint.tensor_snapshot import TensorSnapshot, Watch
from shoal.core.errors import CheckpointError
from shoal.memory.tiers.disk import SECTOR

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.image import Chunk, Image
    from shoal.checkpoint.pieces import ReadyPiece

CHUNK_BYTES = 2**23
"""Long enough for a disk's full rate, short enough that waiting for the end of one is cheap."""

_HUGE = 2**21


def host_memory(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Memory that disks and devices reach by themselves, uint8 of whole sectors.

    Its pages are huge and are there: copying to memory that is new costs three times as much.
    """
    import torch

    size = -(-max(nbytes, 1) // SECTOR) * SECTOR
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, -(-size // _HUGE) * _HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(block, dtype=torch.uint8)
    ctypes.memset(memory.data_ptr(), 0, size)  # by one thread, which leaves the interpreter alone
    return memory[:size]


class ByteSource:
    """The bytes of a file that tensors hold.

    Args:
        image: what lies where in the file.
        chosen: its pieces by key. They must not change before they are captured.
        watch: how writes to them are noticed; more than their version is needed where the program
            goes on while they are copied.

    Attributes:
        checksums: key -> CRC32C of what was copied of a piece so far.
    """

    def __init__(
        self,
        image: Image,
        chosen: Mapping[str, ReadyPiece],
        watch: Watch = "version",
    ) -> None:
        self.image = image
        self._tensors = [chosen[slot.key].piece.tensor.detach() for slot in image.slots]
        self._watched = TensorSnapshot(self._tensors, watch)
        self._stops = [slot.stop for slot in image.slots]
        self._flat: dict[int, Tensor] = {}
        self.checksums = {slot.key: 0 for slot in image.slots}

    def fill(self, at: int, out: Tensor) -> None:
        """Copy the bytes of the file from ``at`` on; those of a piece in their order.

        Args:
            at: first byte.
            out: uint8 in host memory; filled to its end.

        Raises:
            CheckpointError: a tensor was changed meanwhile; names it.
        """
        end = at + len(out)
        head = self.image.header[at:end]
        ctypes.memmove(out.data_ptr(), head, len(head))
        number = bisect.bisect_right(self._stops, at)
        while number < len(self._stops):
            slot = self.image.slots[number]
            if slot.start >= end:
                break
            low, high = max(slot.start, at), min(slot.stop, end)
            part = self._bytes(number)[low - slot.start : high - slot.start]
            place = out[low - at : high - at]
            before = self.checksums[slot.key]
            if part.device.type == "cpu":
                # Not a copy by torch, which would take threads from training.
                after = copy_crc32c(place.numpy(), part.numpy(), before)
            else:
                place.copy_(part)
                after = crc32c(place.numpy(), before)
            self.checksums[slot.key] = after
            if slot.stop <= end:
                self._flat.pop(number, None)
                self._unchanged(number)
            number += 1

    def fetch(self, memory: Tensor) -> None:
        """Copy the whole file out of a device, and return when it is there.

        Args:
            memory: uint8, pinned, as long as the file.
        """
        import torch

        head = len(self.image.header)
        ctypes.memmove(memory.data_ptr(), self.image.header, head)
        with torch.no_grad():
            for slot, tensor in zip(self.image.slots, self._tensors, strict=True):
                place = memory[slot.start : slot.stop].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def _bytes(self, number: int) -> Tensor:
        """A tensor's bytes; one that is not contiguous is made so once."""
        import torch

        if number not in self._flat:
            tensor = self._tensors[number].contiguous()
            self._flat[number] = tensor.reshape(-1).view(torch.uint8)
        return self._flat[number]

    def _unchanged(self, number: int) -> None:
        slot = self.image.slots[number]
        if self._watched.changed(number, self.checksums[slot.key]):
            raise CheckpointError(
                f"tensor {slot.name!r} was changed while it was being saved, "
                "so this save is dropped; call before_update() before tensors change, give what "
                "the forward pass changes as a Piece with volatile=True, or save in mode snapshot"
            )


def straight(source: ByteSource) -> Iterator[Chunk]:
    """A file in chunks that a disk takes directly; each is used before the next is made."""
    import torch

    size = source.image.size
    memory = host_memory(min(CHUNK_BYTES, size))
    for at in range(0, size, CHUNK_BYTES):
        part = memory[: min(CHUNK_BYTES, size - at)]
        with torch.no_grad():
            source.fill(at, part)
        yield at, part.numpy()
