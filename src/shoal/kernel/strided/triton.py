"""Pack and unpack on a GPU: every program moves a block of packed words.

Packed words are neighbours, so that their side is always coalesced; the other side is as far
as the type allows. One launch moves up to three dimensions.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.base import StridedKernel, byte_tensor, checked_out, checked_room
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import StridedBlock, word_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TritonPack", "TritonUnpack"]

_BLOCK = 1024


class _Triton(TritonKernel, StridedKernel):
    invariant: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = StridedKernel.dtypes
    memory_share: ClassVar[float] = 0.7
    block_s: ClassVar[float] = 0.0
    call_s: ClassVar[float] = 2e-5

    def _refuses(self, call: Any) -> str | None:
        if not isinstance(call.layout, StridedBlock):
            return "copies strided blocks, not lists of blocks"
        return None


@part
class TritonPack(_Triton):
    """Words of the largest power of two up to 8 bytes that divides everything."""

    op: ClassVar[str] = "pack"

    def _prepare(self, call: Pack) -> Ready:
        import torch

        layout, span = call.layout, call.layout.span
        assert isinstance(layout, StridedBlock)

        def pack(buffer: Tensor, out: Tensor | None = None) -> Tensor:
            checked_room(span, buffer)
            if out is None:
                out = torch.empty(layout.size, dtype=torch.uint8, device=buffer.device)
            checked_out(layout.size, out, buffer)
            _move(layout, buffer, out, pack=True)
            return out

        return pack


@part
class TritonUnpack(_Triton):
    """The same in the other direction."""

    op: ClassVar[str] = "unpack"

    def _prepare(self, call: Unpack) -> Ready:
        layout, span = call.layout, call.layout.span
        assert isinstance(layout, StridedBlock)

        def unpack(packed: Tensor, buffer: Tensor) -> Tensor:
            checked_room(span, buffer)
            checked_out(layout.size, packed, buffer)
            _move(layout, buffer, packed, pack=False)
            return buffer

        return unpack


def _move(layout: StridedBlock, buffer: Tensor, packed: Tensor, *, pack: bool) -> None:
    import torch

    from shoal.kernel.strided.triton_code import move

    if not layout.size:
        return
    here = int(buffer.storage_offset()) * buffer.element_size() + layout.start
    there = int(packed.storage_offset()) * packed.element_size()
    word = word_bytes(layout, here, there, largest=8)
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]

    def words(tensor: Tensor) -> Tensor:
        whole = byte_tensor(tensor)
        return whole[: len(whole) // word * word].view(dtype)

    strided, target = words(buffer), words(packed)
    counts = (layout.counts[0] // word, *layout.counts[1:], 1, 1)
    strides = [s // word for s in (*layout.strides, 0, 0)]
    total = counts[0] * counts[1] * counts[2]
    grid = (-(-total // _BLOCK),)
    outer = [range(n) for n in reversed(layout.counts[3:])]
    for step, indices in enumerate(itertools.product(*outer)):
        skip = sum(i * s for i, s in zip(reversed(indices), strides[3:], strict=False))
        move[grid](
            strided[here // word + skip :],
            target[there // word + step * total :],
            total,
            counts[0],
            counts[1],
            strides[1],
            strides[2],
            BLOCK=_BLOCK,
            PLANES=len(layout.counts) > 2,
            PACK=pack,
        )
