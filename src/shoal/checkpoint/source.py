"""From tensors to the bytes of a file, a chunk at a time."""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.core.errors import CheckpointError
from shoal.memory.disk import SECTOR

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.image import Chunk, Image
    from shoal.checkpoint.pieces import Chosen

__all__ = ["CHUNK_BYTES", "Source", "host_memory", "straight"]

CHUNK_BYTES = 2**23
"""Long enough for a disk's full rate, short enough that nobody waits for the end of one."""

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
    memory[::SECTOR] = 0
    return memory[:size]


class Source:
    """The bytes of a file that tensors hold.

    Args:
        image: what lies where in the file.
        chosen: its pieces by key. They must not change before they are captured.
    """

    def __init__(self, image: Image, chosen: Mapping[str, Chosen]) -> None:
        self.image = image
        self._tensors = [chosen[slot.key].piece.tensor.detach() for slot in image.slots]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._stops = [slot.stop for slot in image.slots]
        self._flat: tuple[int, Tensor] | None = None

    def fill(self, at: int, out: Tensor) -> None:
        """Copy the bytes of the file from ``at`` on.

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
            flat = self._bytes(number)
            part = flat[low - slot.start : high - slot.start]
            if part.device.type == "cpu":
                # Not a copy by torch, which would take threads from those who train.
                ctypes.memmove(out.data_ptr() + low - at, part.data_ptr(), high - low)
            else:
                out[low - at : high - at].copy_(part)
            if slot.stop <= end:
                self._unchanged(number)
            number += 1

    def _bytes(self, number: int) -> Tensor:
        """A tensor's bytes; one that is not contiguous is made so once."""
        import torch

        if self._flat is None or self._flat[0] != number:
            flat = self._tensors[number].contiguous().reshape(-1).view(torch.uint8)
            self._flat = number, flat
        return self._flat[1]

    def _unchanged(self, number: int) -> None:
        if _version(self._tensors[number]) != self._versions[number]:
            raise CheckpointError(
                f"tensor {self.image.slots[number].name!r} was changed while it was being saved, "
                "so this save is dropped; call before_update() before tensors change, or save in "
                "mode snapshot"
            )


def straight(source: Source) -> Iterator[Chunk]:
    """A file in chunks that a disk takes directly; each is used before the next is made."""
    import torch

    size = source.image.size
    memory = host_memory(min(CHUNK_BYTES, size))
    for at in range(0, size, CHUNK_BYTES):
        part = memory[: min(CHUNK_BYTES, size - at)]
        with torch.no_grad():
            source.fill(at, part)
        yield at, part.numpy()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
