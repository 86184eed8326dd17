"""CRC32C of bytes in memory: finds every flipped bit, and costs less than writing them.

The processor has an instruction for it. A function of a few lines uses it without holding the
interpreter's lock, so that a thread that writes a checkpoint does not hold up the one that trains;
where there is no compiler, google-crc32c computes the same. Bytes that are copied anyway are
checked on the way, so that they pass through the processor once.

Source: RFC 3720, 2004, appendix B.4 (the polynomial and its test values).
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import BuildError
from shoal.core.extras import import_extra

if TYPE_CHECKING:
    import numpy as np

# google-crc32c holds the interpreter's lock, so it is asked for little at a time.
_CHUNK_BYTES = 2**20

# Of CRC32C, its bits in the order in which they are shifted out.
_POLYNOMIAL = 0x82F63B78


def crc32c(data: np.ndarray, before: int = 0) -> int:
    """The checksum of bytes, or of what ``before`` is the checksum of, followed by them.

    Args:
        data: uint8, contiguous, of one dimension.
        before: checksum of what came before.
    """
    library = native()
    if library is None:
        return _portable(data, before)
    return int(library.shoal_crc32c(before, data.ctypes.data, data.nbytes))


def copy_crc32c(target: np.ndarray, data: np.ndarray, before: int = 0) -> int:
    """The same, and the bytes are copied.

    Args:
        target: uint8, contiguous, as long as ``data``, and apart from it.
        data: uint8, contiguous, of one dimension.
        before: checksum of what came before.
    """
    return copy_crc32c_at(target.ctypes.data, data.ctypes.data, data.nbytes, before)


def copy_crc32c_at(target: int, data: int, nbytes: int, before: int = 0) -> int:
    """The same of two places in memory, for copies of many small pieces.

    Args:
        target: address to copy to.
        data: address of the bytes; both live, and lie apart.
        nbytes: how many.
        before: checksum of what came before.
    """
    library = native()
    if library is None:
        ctypes.memmove(target, data, nbytes)
        return _portable(memoryview((ctypes.c_uint8 * nbytes).from_address(target)), before)
    return int(library.shoal_copy_crc32c(before, target, data, nbytes))


def sampled_crc32c(data: int, nbytes: int, seed: int) -> int | None:
    """The checksum of a line of 64 bytes of each 4096, and of what is left behind the last 4096.

    Args:
        data: address of the bytes.
        nbytes: how many.
        seed: which line of each.

    Returns:
        None where there is no native code for it.
    """
    library = native()
    return None if library is None else int(library.shoal_sample_crc32c(seed, data, nbytes))


@functools.cache
def native() -> ctypes.CDLL | None:
    """The native functions of ``crc32c.cpp``; None where they cannot be built."""
    try:
        return library()
    except BuildError:
        return None


@functools.cache
def library() -> ctypes.CDLL:
    """``crc32c.cpp``, compiled; BuildError where it cannot be."""
    from shoal.core.native import build

    built = build(Path(__file__).with_name("crc32c.cpp").read_text("utf-8"), name="crc32c")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    built.shoal_sample_crc32c.argtypes = (ctypes.c_uint64, pointer, size)
    built.shoal_sample_crc32c.restype = ctypes.c_uint32
    for name, bits in (("16", ctypes.c_uint16), ("32", ctypes.c_uint32), ("64", ctypes.c_uint64)):
        look = getattr(built, f"shoal_not_finite{name}")
        look.argtypes, look.restype = (pointer, size, bits), ctypes.c_int
    for function, pointers in ((built.shoal_crc32c, 1), (built.shoal_copy_crc32c, 2)):
        function.argtypes = (ctypes.c_uint32, *[pointer] * pointers, size)
        function.restype = ctypes.c_uint32
    return built


def _portable(data: np.ndarray | memoryview, before: int) -> int:
    google = import_extra("google_crc32c", extra="run", purpose="the checksums of checkpoints")
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        # It takes bytes and nothing else.
        before = google.extend(before, bytes(data[start : start + _CHUNK_BYTES]))
    return int(before)


def combined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of bytes of which two halves were looked at by themselves.

    Appending zeros to what was looked at is linear over the bits of its checksum.
    """
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _times(_zeros(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


@functools.cache
def _zeros(power: int) -> tuple[int, ...]:
    """What ``2**power`` bytes of zeros do to each bit of a checksum."""
    if power:
        half = _zeros(power - 1)
        return tuple(_times(half, column) for column in half)
    columns = [1 << bit for bit in range(32)]
    for _ in range(8):
        columns = [(one >> 1) ^ (_POLYNOMIAL if one & 1 else 0) for one in columns]
    return tuple(columns)


def _times(columns: tuple[int, ...], value: int) -> int:
    times = 0
    for column in columns:
        if value & 1:
            times ^= column
        value >>= 1
    return times
