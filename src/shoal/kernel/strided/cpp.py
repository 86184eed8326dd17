"""Pack and unpack in C++: short blocks as words, long ones past the caches."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.base import StridedKernel, checked_out, checked_room
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import Layout, StridedBlock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CppPack", "CppUnpack"]

# Packed bytes from which they go past the caches: nobody reads them again from there soon.
_STREAM = 4 * 2**20
# Bytes of lines below which a second thread costs more than it saves.
_THREADS = 256 * 2**10


def _plan(layout: StridedBlock) -> ctypes.Array[ctypes.c_int64]:
    dims = len(layout.counts)
    head = (dims, _STREAM, int(layout.touched >= _THREADS))
    return (ctypes.c_int64 * (3 + 2 * dims))(*head, *layout.counts, *layout.strides)


def _mover(layout: Layout, op: str) -> Ready:
    """(address of offset 0, address of the packed bytes) -> nothing."""
    from shoal.kernel.native import function

    if isinstance(layout, StridedBlock):
        run = function("strided", f"strided_{op}", "ppp")
        plan, start = _plan(layout), layout.start
        at = ctypes.addressof(plan)

        def move(strided: int, packed: int) -> None:
            run(strided + start, packed, at)

        move.plan = plan  # type: ignore[attr-defined]  # lives as long as the function
        return move
    run = function("strided", f"blocks_{op}", "pppppll")
    n = len(layout.offsets)
    places = list(itertools.accumulate(layout.lengths, initial=0))[:-1]
    arrays = [(ctypes.c_int64 * n)(*values) for values in (layout.offsets, layout.lengths, places)]
    addresses = [ctypes.addressof(array) for array in arrays]
    threads = int(layout.touched >= _THREADS)

    def move_list(base: int, packed: int) -> None:
        run(base, packed, *addresses, n, threads)

    move_list.arrays = arrays  # type: ignore[attr-defined]
    return move_list


@part
class CppPack(StridedKernel):
    """Words of a block's own size, one loop for one to three dimensions, a walk for more.

    Results of 4 MiB and more are gathered by pages and stored past the caches. Where the
    inner dimension jumps over lines and an outer one does not, as in a transposed matrix,
    tiles of both are moved.
    """

    op: ClassVar[str] = "pack"
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.6
    block_s: ClassVar[float] = 5e-10
    call_s: ClassVar[float] = 2e-6

    def _prepare(self, call: Pack) -> Ready:
        import torch

        layout, span = call.layout, call.layout.span
        size, move = layout.size, _mover(layout, "pack")

        def pack(buffer: Tensor, out: Tensor | None = None) -> Tensor:
            checked_room(span, buffer)
            if out is None:
                out = torch.empty(size, dtype=torch.uint8)
            else:
                checked_out(size, out, buffer)
            if size:
                move(buffer.data_ptr(), out.data_ptr())
            return out

        return pack


@part
class CppUnpack(StridedKernel):
    """The same walk in the other direction."""

    op: ClassVar[str] = "unpack"
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.5
    block_s: ClassVar[float] = 7e-10
    call_s: ClassVar[float] = 2e-6

    def _prepare(self, call: Unpack) -> Ready:
        layout, span = call.layout, call.layout.span
        size, move = layout.size, _mover(layout, "unpack")

        def unpack(packed: Tensor, buffer: Tensor) -> Tensor:
            checked_room(span, buffer)
            checked_out(size, packed, buffer)
            if size:
                move(buffer.data_ptr(), packed.data_ptr())
            return buffer

        return unpack
