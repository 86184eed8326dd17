"""Whether the matrix tiles of this CPU can be used."""

from __future__ import annotations

import ctypes
import functools
import platform

from shoal.core.native import cpu_flags

# Flags of a CPU with tiles for both types of numbers.
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})


@functools.cache
def has_tiles() -> bool:
    """This CPU has matrix tiles, and the system lets this process use them."""
    return cpu_flags() >= TILES and tiles_granted()


@functools.cache
def tiles_granted() -> bool:
    """Whether Linux lets this process use matrix tiles; asks it to."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)
