"""PyTorch's own strided copy: the peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.base import StridedKernel, byte_tensor, checked_out, checked_room
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import StridedBlock, word_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LibraryPack", "LibraryUnpack"]


def _refusal(layout: Any) -> str | None:
    if not isinstance(layout, StridedBlock):
        return "copies strided blocks, not lists of blocks"
    if min(layout.strides) < 0:
        return "has no negative strides"
    return None


def _view(layout: StridedBlock, buffer: Tensor, packed: Tensor) -> Tensor:
    """The layout as a tensor of the widest words that fit both, the dense dimension last."""
    import torch

    here = int(buffer.storage_offset()) * buffer.element_size() + layout.start
    there = int(packed.storage_offset()) * packed.element_size()
    whole = byte_tensor(buffer)
    word = word_bytes(layout, here, there)
    dtypes = {
        1: torch.uint8,
        2: torch.int16,
        4: torch.int32,
        8: torch.int64,
        16: torch.complex128,
    }
    words = whole[: len(whole) // word * word].view(dtypes[word])
    shape = (*layout.counts[:0:-1], layout.counts[0] // word)
    strides = (*(s // word for s in layout.strides[:0:-1]), 1)
    return words.as_strided(shape, strides, here // word)


@part
class LibraryPack(StridedKernel):
    """``as_strided`` and ``copy_``."""

    op: ClassVar[str] = "pack"
    backend: ClassVar[str] = "torch"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.3
    block_s: ClassVar[float] = 3e-9
    call_s: ClassVar[float] = 1e-5

    def _refuses(self, call: Pack) -> str | None:
        return _refusal(call.layout)

    def _prepare(self, call: Pack) -> Ready:
        import torch

        layout, span = call.layout, call.layout.span
        assert isinstance(layout, StridedBlock)

        def pack(buffer: Tensor, out: Tensor | None = None) -> Tensor:
            checked_room(span, buffer)
            if out is None:
                out = torch.empty(layout.size, dtype=torch.uint8, device=buffer.device)
            checked_out(layout.size, out, buffer)
            if layout.size:
                view = _view(layout, buffer, out)
                _words(out, view).copy_(view)
            return out

        return pack


@part
class LibraryUnpack(StridedKernel):
    """``as_strided`` and ``copy_``."""

    op: ClassVar[str] = "unpack"
    backend: ClassVar[str] = "torch"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.3
    block_s: ClassVar[float] = 3e-9
    call_s: ClassVar[float] = 1e-5

    def _refuses(self, call: Unpack) -> str | None:
        return _refusal(call.layout)

    def _prepare(self, call: Unpack) -> Ready:
        layout, span = call.layout, call.layout.span
        assert isinstance(layout, StridedBlock)

        def unpack(packed: Tensor, buffer: Tensor) -> Tensor:
            checked_room(span, buffer)
            checked_out(layout.size, packed, buffer)
            if layout.size:
                view = _view(layout, buffer, packed)
                view.copy_(_words(packed, view))
            return buffer

        return unpack


def _words(packed: Tensor, view: Tensor) -> Tensor:
    """Packed bytes in the shape and words of the view."""
    import torch

    flat = packed.view(-1).view(torch.uint8)
    return flat.view(view.dtype).view(view.shape)
