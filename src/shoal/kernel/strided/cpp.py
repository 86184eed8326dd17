"""Pack and unpack in C++: short blocks as words, long ones past the caches."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.base import PackKernel, StridedKernel, UnpackKernel
from shoal.kernel.strided.canonical import Layout, StridedBlock

if TYPE_CHECKING:
    from torch import Tensor

# Packed bytes from which they go past the caches: they are not read again from there soon.
_STREAM = 4 * 2**20
# Bytes of lines below which a second thread costs more than it saves.
_THREADS = 256 * 2**10


def _plan(layout: StridedBlock) -> ctypes.Array[ctypes.c_int64]:
    dims = len(layout.counts)
    head = (dims, _STREAM, int(layout.touched >= _THREADS))
    return (ctypes.c_int64 * (3 + 2 * dims))(*head, *layout.counts, *layout.strides)


def _walk(layout: Layout, op: str) -> Ready:
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


class _Cpp(StridedKernel):
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    call_s: ClassVar[float] = 2e-6

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        run = _walk(layout, self.op)

        def move(buffer: Tensor, packed: Tensor) -> None:
            run(buffer.data_ptr(), packed.data_ptr())

        return move


@part
class CppPack(_Cpp, PackKernel):
    """Copies words of the block's size, in a loop for up to three dimensions.

    Results of 4 MiB and more are gathered by pages and written with non-temporal stores. If the
    inner dimension strides over cache lines and an outer one does not, as in a transposed matrix,
    tiles of both dimensions are copied.
    """

    memory_share: ClassVar[float] = 0.6
    block_s: ClassVar[float] = 5e-10


@part
class CppUnpack(_Cpp, UnpackKernel):
    """The inverse of ``pack.cpp``."""

    memory_share: ClassVar[float] = 0.5
    block_s: ClassVar[float] = 7e-10
