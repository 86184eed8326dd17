"""The meaning of ``pack`` and ``unpack``: the offset of every byte, and one indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.strided.base import (
    PackKernel,
    StridedKernel,
    UnpackKernel,
    byte_tensor,
    offsets_of,
)
from shoal.kernel.strided.canonical import Layout

if TYPE_CHECKING:
    from torch import Tensor


class _Reference(StridedKernel):
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.01
    call_s: ClassVar[float] = 3e-5


@part
class ReferencePack(_Reference, PackKernel):
    """Plain torch, byte by byte; slow."""

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        def move(buffer: Tensor, packed: Tensor) -> None:
            result = byte_tensor(buffer)[_places(layout, buffer)]
            packed.view(-1).view(result.dtype).copy_(result)

        return move


@part
class ReferenceUnpack(_Reference, UnpackKernel):
    """Plain torch, byte by byte; slow."""

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        def move(buffer: Tensor, packed: Tensor) -> None:
            target = byte_tensor(buffer)
            target[_places(layout, buffer)] = packed.view(-1).view(target.dtype)

        return move


def _places(layout: Layout, buffer: Tensor) -> Tensor:
    """Of every packed byte in the buffer's memory, int64 [size]."""
    here = int(buffer.storage_offset()) * buffer.element_size()
    return here + offsets_of(layout, buffer.device)
