"""PyTorch's own strided copy: the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.strided.base import PackKernel, StridedKernel, UnpackKernel, byte_tensor
from shoal.kernel.strided.canonical import Layout, StridedBlock, word_bytes

if TYPE_CHECKING:
    from torch import Tensor


def _view(layout: Layout, buffer: Tensor, packed: Tensor) -> Tensor:
    """The layout as a tensor of the widest words that fit both, the dense dimension last."""
    import torch

    assert isinstance(layout, StridedBlock)
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


class _Library(StridedKernel):
    backend: ClassVar[str] = "torch"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    memory_share: ClassVar[float] = 0.3
    block_s: ClassVar[float] = 3e-9
    call_s: ClassVar[float] = 1e-5

    def _refuses(self, call: Any) -> str | None:
        if not isinstance(call.layout, StridedBlock):
            return "copies strided blocks, not lists of blocks"
        if min(call.layout.strides) < 0:
            return "has no negative strides"
        return None


@part
class LibraryPack(_Library, PackKernel):
    """``as_strided`` and ``copy_``."""

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        def move(buffer: Tensor, packed: Tensor) -> None:
            view = _view(layout, buffer, packed)
            _words(packed, view).copy_(view)

        return move


@part
class LibraryUnpack(_Library, UnpackKernel):
    """``as_strided`` and ``copy_``."""

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        def move(buffer: Tensor, packed: Tensor) -> None:
            view = _view(layout, buffer, packed)
            view.copy_(_words(packed, view))

        return move


def _words(packed: Tensor, view: Tensor) -> Tensor:
    """Packed bytes in the shape and words of the view."""
    import torch

    flat = packed.view(-1).view(torch.uint8)
    return flat.view(view.dtype).view(view.shape)
