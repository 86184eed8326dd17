"""Arithmetic over GF(256), the field of bytes, and matrices over it.

Addition is XOR; multiplication is that of polynomials modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d),
with 2 as a generator: the field of RAID-6, of ``zfec`` and of ``reedsolo``. The one loop over
data, ``out ^= c * x``, is native; without a compiler a lookup of numpy takes its place.

Source: Plank, A Tutorial on Reed-Solomon Coding for Fault-Tolerance in RAID-like Systems, 1997;
Plank, Greenan, Miller, Screaming Fast Galois Field Arithmetic Using Intel SIMD, 2013.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError, CheckpointError
from shoal.core.native import build

Bytes = npt.NDArray[np.uint8]

_POLYNOMIAL = 0x11D


def _tables() -> tuple[list[int], list[int]]:
    """Powers of 2 (twice over, so that sums of logarithms need no modulus), and logarithms."""
    powers, logs = [0] * 510, [0] * 256
    value = 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value <<= 1
        if value & 0x100:
            value ^= _POLYNOMIAL
    return powers, logs


_POWERS, _LOGS = _tables()


def _products() -> Bytes:
    powers, logs = np.array(_POWERS, np.uint8), np.array(_LOGS)
    products: Bytes = powers[logs[:, None] + logs[None, :]]
    products[0], products[:, 0] = 0, 0
    return products


PRODUCTS: Bytes = _products()
"""a * b at [a, b]."""


def add_scaled(out: Bytes, factor: int, x: Bytes) -> None:
    """``out ^= factor * x``, in place.

    Args:
        out: contiguous bytes [n].
        factor: 0 to 255.
        x: contiguous bytes [n].
    """
    if factor == 1:
        np.bitwise_xor(out, x, out=out)
    elif factor:
        call = native()
        if call is None:
            np.bitwise_xor(out, PRODUCTS[factor][x], out=out)
        else:
            low, high, matrix = _constants(factor)
            call(out.ctypes.data, x.ctypes.data, out.size, low, high, matrix)


@functools.cache
def library() -> ctypes.CDLL:
    """``gf256.cpp``, compiled; BuildError where it cannot be."""
    built = build(Path(__file__).with_name("gf256.cpp").read_text("utf-8"), name="gf256")
    pointer = c_void_p
    built.gf_add_scaled.argtypes = [pointer, pointer, c_int64, pointer, pointer, c_uint64]
    built.gf_add_scaled.restype = None
    return built


@functools.cache
def native() -> Callable[..., Any] | None:
    """The native loop; None where it cannot be built, which is said once."""
    try:
        call: Callable[..., Any] = library().gf_add_scaled
    except BuildError as cause:
        warnings.warn(f"coding in memory is several times slower: {cause}", stacklevel=2)
        return None
    return call


@functools.cache
def _constants(factor: int) -> tuple[int, int, int]:
    """Addresses of the products with half bytes, and the bit matrix, of a factor."""
    row = PRODUCTS[factor]
    halves = np.concatenate([row[:16], row[16 * np.arange(16)]])
    _KEPT[factor] = halves
    matrix = 0
    for bit in range(8):  # row of the result's bit: which bits of x flip it
        wanted = sum(((int(row[1 << i]) >> bit) & 1) << i for i in range(8))
        matrix |= wanted << 8 * (7 - bit)
    return halves.ctypes.data, halves.ctypes.data + 16, matrix


# What the addresses point to must live on.
_KEPT: dict[int, Bytes] = {}


def matmul(a: Bytes, b: Bytes) -> Bytes:
    """Product of two small matrices [p, q] and [q, r] over the field."""
    result: Bytes = np.bitwise_xor.reduce(PRODUCTS[a[:, :, None], b[None, :, :]], axis=1)
    return result


def invert(matrix: Bytes) -> Bytes:
    """Inverse of a square matrix, by Gauss and Jordan.

    Raises:
        CheckpointError: it has none.
    """
    size = len(matrix)
    work = np.concatenate([matrix, np.eye(size, dtype=np.uint8)], axis=1)
    for column in range(size):
        rows = np.flatnonzero(work[column:, column])
        if not len(rows):
            raise CheckpointError("the blocks that are left do not determine the lost ones")
        pivot = column + int(rows[0])
        work[[column, pivot]] = work[[pivot, column]]
        inverse = _POWERS[255 - _LOGS[int(work[column, column])]]
        work[column] = PRODUCTS[inverse][work[column]]
        for row in range(size):
            if row != column and work[row, column]:
                work[row] ^= PRODUCTS[int(work[row, column])][work[column]]
    result: Bytes = np.ascontiguousarray(work[:, size:])
    return result


def generator_matrix(data: int, parity: int) -> Bytes:
    """Rows [data + parity, data] of which any ``data`` are independent; the first are the identity.

    A Vandermonde matrix over the points 0, 1, 2, 4, ..., with its first rows made the identity.
    """
    total = data + parity
    points = [0, *_POWERS[: total - 1]]
    rows = np.zeros((total, data), np.uint8)
    rows[:, 0] = 1
    for column in range(1, data):
        rows[:, column] = PRODUCTS[rows[:, column - 1], np.array(points, np.uint8)]
    return matmul(rows, invert(rows[:data]))
