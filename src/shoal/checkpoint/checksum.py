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

__all__ = ["combined", "copied", "crc32c"]

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#define PUT(p, x) _mm_stream_si64((long long*)(p), (long long)(x))
#define END() _mm_sfence()
#define ONE(c, x) _mm_crc32_u8((uint32_t)(c), x)
#define EIGHT(c, x) _mm_crc32_u64(c, x)
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define ONE(c, x) __crc32cb((uint32_t)(c), x)
#define EIGHT(c, x) __crc32cd((uint32_t)(c), x)
#define PUT(p, x) memcpy(p, &(x), 8)
#define END()
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
extern "C" uint32_t shoal_crc32c_copy(
    uint32_t before, const uint8_t* data, size_t size, uint8_t* out) {
  uint64_t crc = before ^ 0xFFFFFFFFu;
  for (; size >= 8; size -= 8, data += 8, out += 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    crc = EIGHT(crc, word);
    PUT(out, word);
  }
  END();
  for (; size; --size, ++data, ++out) {
    crc = ONE(crc, *data);
    *out = *data;
  }
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
    return _functions()[0](data, before)


def copied(data: np.ndarray, address: int, before: int = 0) -> int:
    """The same, and the bytes are copied to ``address`` on the way.

    They are written past the processor's cache, so memory that is only overwritten is not fetched
    first.

    Args:
        data: uint8, contiguous, of one dimension.
        address: of memory in which there is room for them.
        before: checksum of what came before.
    """
    return _functions()[1](data, address, before)


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
def _functions() -> tuple[Callable[[np.ndarray, int], int], Callable[[np.ndarray, int, int], int]]:
    """What looks at bytes, and what looks at them and copies them."""
    from shoal.core.native import build

    try:
        library = build(_SOURCE, name="crc32c")
    except BuildError:
        return _portable, _portable_copy
    look, copy = library.shoal_crc32c, library.shoal_crc32c_copy
    for native in (look, copy):
        native.restype = ctypes.c_uint32
    look.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    copy.argtypes = (*look.argtypes, ctypes.c_void_p)

    def looked(data: np.ndarray, before: int) -> int:
        return int(look(before, data.ctypes.data, data.nbytes))

    def copied(data: np.ndarray, address: int, before: int) -> int:
        return int(copy(before, data.ctypes.data, data.nbytes, address))

    return looked, copied


def _portable(data: np.ndarray, before: int) -> int:
    google = import_extra("google_crc32c", extra="run", purpose="the checksums of checkpoints")
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        before = google.extend(before, data[start : start + _CHUNK_BYTES])
    return before


def _portable_copy(data: np.ndarray, address: int, before: int) -> int:
    ctypes.memmove(address, data.ctypes.data, data.nbytes)
    return _portable(data, before)
