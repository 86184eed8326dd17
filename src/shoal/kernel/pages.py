"""Memory in large pages, where the system gives them: one look-up of an address serves 2 MiB."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PAGE, _LINE = 2 << 20, 64


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """``madvise`` of the C library; None where it knows no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def large_bytes(nbytes: int) -> int:
    """Bytes of the large pages for so many bytes: the last one too, if they nearly fill it."""
    rest = -nbytes % _PAGE
    return nbytes + rest if rest <= nbytes // 8 else nbytes // _PAGE * _PAGE


def room(nbytes: int) -> Tensor:
    """Memory for what is written once and then read from its first byte to its last, uint8.

    A wish: where the system does not grant large pages, nothing changes but speed. What fills
    none begins with a line of the cache, and lies where it may.
    """
    import torch

    large = large_bytes(nbytes)
    unit = _PAGE if large else _LINE
    whole = torch.empty(max(nbytes, large) + unit, dtype=torch.uint8)
    first = -whole.data_ptr() % unit
    advise = _advise()
    if advise is not None and large:
        advise(whole.data_ptr() + first, large, mmap.MADV_HUGEPAGE)
    return whole[first : first + nbytes]


# Linux 5.14: pages are there as after a write, and nothing is written.
_POPULATE_WRITE = 23


def populate(tensors: Sequence[Tensor], nbytes: int) -> threading.Thread:
    """Have the first so many bytes of each tensor mapped to memory, by a thread in the background.

    What is in them stays, so that they may be used meanwhile. A page that is first written where
    it is needed takes longer than what is written to it: that of a virtual machine may have to
    come from the host. A wish: a system that cannot leaves it to the first write.
    """
    places = [
        (tensor.data_ptr(), min(nbytes, tensor.numel() * tensor.element_size()))
        for tensor in tensors
    ]

    def run() -> None:
        advise = _advise()
        if advise is None:
            return
        for first, length in places:
            start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
            count = (first + length - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if count > 0 and advise(start, count, _POPULATE_WRITE):
                return

    thread = threading.Thread(target=run, name="populate", daemon=True)
    thread.start()
    return thread


# Of tensors that are gone, the last first out of use: pages that need no clearing again.
_GONE: deque[mmap.mmap] = deque(maxlen=8)
# Linux: pages count against nothing until they are written.
_NORESERVE = 0x4000


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in such memory, which serves the next when it is gone: clearing takes longest.

    It is no view of another, since what is given away may be changed in place. Until memory is
    used again the system may have it back.
    """
    import torch

    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < _PAGE or not (hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")):
        return torch.empty(shape, dtype=dtype)
    whole = torch.frombuffer(until_gone(mapped(nbytes)), dtype=dtype, count=count)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), 0, shape, stride)


def mapped(nbytes: int) -> mmap.mmap:
    """Large pages for so many bytes: those of what is gone, or new ones.

    What is not written takes no memory.

    Raises:
        OSError: the system does not promise so much.
    """
    length = -(-nbytes // _PAGE) * _PAGE
    # What is much larger is left for what is large.
    fits = (gone for gone in tuple(_GONE) if length <= len(gone) <= 2 * length)
    for pages in sorted(fits, key=len):
        with contextlib.suppress(ValueError):  # another thread was faster
            _GONE.remove(pages)
            return pages
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages: only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def until_gone(pages: mmap.mmap) -> memoryview:
    """What ``torch.frombuffer`` makes a tensor of; when that is gone, the pages serve the next."""
    held = memoryview(pages)
    if hasattr(mmap, "MADV_FREE"):
        weakref.finalize(held, _keep, pages).atexit = False
    return held


def _keep(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a system that takes none back: unmapped
        pages.madvise(mmap.MADV_FREE)
        _GONE.append(pages)
