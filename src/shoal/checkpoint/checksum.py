"""CRC32C of bytes in memory: finds every flipped bit, and costs less than writing them.

The processor has an instruction for it. A function of a few lines uses it without holding the
interpreter's lock, so that a thread that writes a checkpoint does not hold up the one that trains;
where there is no compiler, google-crc32c computes the same.

Source: RFC 3720, 2004, appendix B.4 (the polynomial and its test values).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.errors import BuildError
from shoal.core.extras import import_extra

if TYPE_CHECKING:
    import numpy as np

__all__ = ["combined", "crc32c"]

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define ONE(c, x) _mm_crc32_u8((uint32_t)(c), x)
#define EIGHT(c, x) _mm_crc32_u64(c, x)
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define ONE(c, x) __crc32cb((uint32_t)(c), x)
#define EIGHT(c, x) __crc32cd((uint32_t)(c), x)
#else
#error no instruction
#endif
extern "C" uint32_t shoal_crc32c(uint32_t before, const uint8_t* data, size_t size) {
  uint64_t crc = before ^ 0xFFFFFFFFu;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    crc = EIGHT(crc, word);
  }
  for (; size; --size, ++data) crc = ONE(crc, *data);
  return (uint32_t)crc ^ 0xFFFFFFFFu;
}
"""

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
    return _function()(data, before)


def combined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of bytes of which two halves were looked at by themselves.

    Appending zeros to what was looked at is linear over the bits of its checksum.

    Args:
        first: checksum of the first half.
        second: checksum of the second.
        second_bytes: length of the second.
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
    found = 0
    for column in columns:
        if value & 1:
            found ^= column
        value >>= 1
    return found


@functools.cache
def _function() -> Callable[[np.ndarray, int], int]:
    from shoal.core.native import build

    try:
        library = build(_SOURCE, name="crc32c")
    except BuildError:
        return _portable
    native = library.shoal_crc32c
    native.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    native.restype = ctypes.c_uint32

    def call(data: np.ndarray, before: int) -> int:
        return int(native(before, data.ctypes.data, data.nbytes))

    return call


def _portable(data: np.ndarray, before: int) -> int:
    google = import_extra("google_crc32c", extra="run", purpose="the checksums of checkpoints")
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        before = google.extend(before, data[start : start + _CHUNK_BYTES])
    return before
