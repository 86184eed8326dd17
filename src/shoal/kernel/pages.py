"""Memory in large pages, where the system gives them: one look-up of an address serves 2 MiB."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["empty", "room"]

_PAGE, _LINE = 2 << 20, 64


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """``madvise`` of the C library; None where it knows no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def room(nbytes: int) -> Tensor:
    """Memory for what is written once and then read from its first byte to its last, uint8.

    A wish: where the system does not grant large pages, nothing changes but speed. What does
    not fill one begins with a line of the cache, and lies where it may.
    """
    import torch

    unit = _PAGE if nbytes >= _PAGE else _LINE
    whole = torch.empty(nbytes + unit, dtype=torch.uint8)
    first = -whole.data_ptr() % unit
    advise = _advise()
    if advise is not None and nbytes >= _PAGE:
        advise(whole.data_ptr() + first, nbytes // _PAGE * _PAGE, mmap.MADV_HUGEPAGE)
    return whole[first : first + nbytes]


# Of tensors that are gone, the last first out of use: pages that need no clearing again.
_GONE: deque[mmap.mmap] = deque(maxlen=8)


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
    length = -(-nbytes // _PAGE) * _PAGE
    pages = _again(length) or _new(length)
    held = memoryview(pages)
    weakref.finalize(held, _keep, pages).atexit = False
    whole = torch.frombuffer(held, dtype=dtype, count=count)
    stride = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), 0, shape, stride)


def _new(length: int) -> mmap.mmap:
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages: only slower
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _again(length: int) -> mmap.mmap | None:
    for pages in tuple(_GONE):
        if len(pages) == length:
            with contextlib.suppress(ValueError):  # another thread was faster
                _GONE.remove(pages)
                return pages
    return None


def _keep(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a system that takes none back: unmapped
        pages.madvise(mmap.MADV_FREE)
        _GONE.append(pages)
