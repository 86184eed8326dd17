"""Memory in large pages, where the system gives them: one look-up of an address serves 2 MiB."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
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


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in such memory: new pages of 4 KiB take longer to come than to be filled.

    No view of another, since what is given away may be changed in place.
    """
    import torch

    whole = room(math.prod(shape) * dtype.itemsize)
    begin = whole.storage_offset() // dtype.itemsize
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), begin, shape)
