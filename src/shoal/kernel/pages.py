"""Memory in large pages, where the system gives them: one look-up of an address serves 2 MiB."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["large_pages"]

_PAGE = 2 << 20


@functools.cache
def _advise() -> ctypes._CFuncPtr | None:
    """``madvise`` of the C library; None where it knows no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def large_pages(tensor: Tensor) -> Tensor:
    """The tensor, whose memory, which nobody has written to yet, comes in large pages.

    A wish: where the system does not grant it, nothing changes but speed.
    """
    first = -(-tensor.data_ptr() // _PAGE) * _PAGE
    last = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
    advise = _advise()
    if advise is not None and last > first:
        advise(first, last - first, mmap.MADV_HUGEPAGE)
    return tensor
