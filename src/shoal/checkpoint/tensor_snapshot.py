"""Whether tensors are what they were when a save began, while they are copied behind the program.

A write that autograd sees raises a tensor's version. One through ``.data``, through memory that is
shared with numpy, or by a native kernel does not; a sample of the bytes shows it: one cache line of
every 4096 bytes, at a place drawn anew for each save, and all bytes of small tensors. So a write
that lasts is noticed if it covers 8 KiB in a row anywhere, and otherwise with probability
``1 - (63 / 64) ** pages`` for a write of a line in each of so many pages; a single element that
changes most likely is not. A digest of all bytes notices every write that
lasts, at the price of reading them once while training waits.

Differs: comparing the copy with its source when the copy is done, which needs no reading in
advance, misses every write that comes before the copy.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from shoal.checkpoint.checksum import crc32c, sampled_crc32c

if TYPE_CHECKING:
    from torch import Tensor

Watch = Literal["version", "sample", "full"]

_PAGE, _LINE = 4096, 64
# Smaller tensors are looked at completely: scales, biases, counts.
_WHOLE = 16 * _PAGE


class TensorSnapshot:
    """The state of tensors at one moment, to be compared with a later one.

    Args:
        how: by their ``version`` alone, also by a ``sample`` of the bytes, or by a ``full`` digest.
    """

    def __init__(self, tensors: Sequence[Tensor], how: Watch = "sample") -> None:
        self._tensors = list(tensors)
        self._seed = secrets.randbits(63) if how == "sample" else None
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._digests: list[int] | None = None
        if how != "version":
            self._digests = [digest(tensor, self._seed) for tensor in self._tensors]

    def changed(self, number: int, copied: int) -> bool:
        """Whether a tensor was written to since.

        Args:
            number: of the tensor.
            copied: CRC32C of what was copied of it.
        """
        tensor = self._tensors[number]
        if _version(tensor) != self._versions[number]:
            return True
        if self._digests is None:
            return False
        now = copied if self._seed is None else digest(tensor, self._seed)
        return now != self._digests[number]


def _version(tensor: Tensor) -> int:
    """How many writes autograd has seen; 0 where it does not look."""
    return 0 if tensor.is_inference() else tensor._version


def digest(tensor: Tensor, seed: int | None = None) -> int:
    """A checksum of a tensor's elements, wherever they lie.

    Args:
        tensor: dense, on any device.
        seed: which sample of them; None for all.
    """
    import torch

    tensor = tensor.detach()
    nbytes = tensor.numel() * tensor.element_size()
    if seed is not None and nbytes > _WHOLE:
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            digest = sampled_crc32c(tensor.data_ptr(), nbytes, seed)
            if digest is not None:
                return digest
        tensor = _sample(tensor, seed)
    data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    return crc32c(data.numpy())


def _sample(tensor: Tensor, seed: int) -> Tensor:
    """Elements of one line of each page, counted in the order of the elements, and the rest."""
    import torch

    size = tensor.element_size()
    page, line = _PAGE // size, max(1, _LINE // size)
    pages, device = tensor.numel() // page, tensor.device
    draw = torch.Generator(device).manual_seed(seed)
    first = torch.randint(page // line, (pages, 1), generator=draw, device=device)
    first = first * line + page * torch.arange(pages, device=device)[:, None]
    inside = (first + torch.arange(line, device=device)).flatten()
    behind = torch.arange(pages * page, tensor.numel(), device=device)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(bits).take(torch.cat([inside, behind]))
