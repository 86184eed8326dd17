"""Pack and unpack on a GPU: every program moves a block of packed words.

Packed words are neighbours, so that their side is always coalesced; the other side is as far
as the type allows. One launch moves up to three dimensions.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.strided.base import PackKernel, StridedKernel, UnpackKernel, byte_tensor
from shoal.kernel.strided.canonical import Layout, StridedBlock, word_bytes

if TYPE_CHECKING:
    from torch import Tensor

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

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        return functools.partial(_move, layout, pack=self.op == "pack")


@part
class TritonPack(_Triton, PackKernel):
    """Copies words of the largest power of two, up to 8 bytes, that divides all strides."""


@part
class TritonUnpack(_Triton, UnpackKernel):
    """The inverse of ``pack.triton``."""


def _move(layout: Layout, buffer: Tensor, packed: Tensor, *, pack: bool) -> None:
    import torch

    from shoal.kernel.strided.triton_code import move

    assert isinstance(layout, StridedBlock)
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
