"""Keep freed memory in the process instead of giving it back after every operator.

A training step frees and allocates the same large tensors again and again. glibc maps
and unmaps them each time by default, and the kernel clears every page anew: about a
tenth of a small model's step on a CPU.
"""

from __future__ import annotations

import ctypes
import platform

# From malloc.h; they are part of glibc's interface.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory; returns whether this C library supports it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20))
    return all(libc.mallopt(option, value) for option, value in wanted)
