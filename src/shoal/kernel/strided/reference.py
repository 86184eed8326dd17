"""The meaning of ``pack`` and ``unpack``: the offset of every byte, and one indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.base import (
    StridedKernel,
    byte_tensor,
    checked_out,
    checked_room,
    offsets_of,
)
from shoal.kernel.strided.calls import Pack, Unpack

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ReferencePack", "ReferenceUnpack"]


@part
class ReferencePack(StridedKernel):
    """Plain torch, a byte at a time; slow on purpose."""

    op: ClassVar[str] = "pack"
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.01
    call_s: ClassVar[float] = 3e-5

    def _prepare(self, call: Pack) -> Ready:
        layout, span = call.layout, call.layout.span

        def pack(buffer: Tensor, out: Tensor | None = None) -> Tensor:
            checked_room(span, buffer)
            here = buffer.storage_offset() * buffer.element_size()
            result = byte_tensor(buffer)[here + offsets_of(layout, buffer.device)]
            if out is None:
                return result
            checked_out(layout.size, out, buffer)
            out.view(-1).view(result.dtype).copy_(result)
            return out

        return pack


@part
class ReferenceUnpack(StridedKernel):
    """Plain torch, a byte at a time; slow on purpose."""

    op: ClassVar[str] = "unpack"
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.01
    call_s: ClassVar[float] = 3e-5

    def _prepare(self, call: Unpack) -> Ready:
        layout, span = call.layout, call.layout.span

        def unpack(packed: Tensor, buffer: Tensor) -> Tensor:
            checked_room(span, buffer)
            checked_out(layout.size, packed, buffer)
            here = buffer.storage_offset() * buffer.element_size()
            target = byte_tensor(buffer)
            target[here + offsets_of(layout, buffer.device)] = packed.view(-1).view(target.dtype)
            return buffer

        return unpack
