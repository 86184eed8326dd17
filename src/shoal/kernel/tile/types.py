"""Types of the elements of a tile: any width from 1 to 8 bits, and the usual wide ones.

``uintN`` and ``intN`` (two's complement) and floats ``floatN_eXmY`` of a sign, X bits of exponent
and Y of mantissa, whose bias is 2^(X-1) - 1 and whose exponent 0 means subnormal. Every code is a
number but two cases of old: with 5 bits of exponent the topmost is infinity and NaN, and in e4m3
all ones below the sign is NaN. Conversion rounds to nearest, ties to even, and saturates.

An array of a narrow type is a dense little-endian bit stream: element i fills the bits i·N to
(i+1)·N - 1, whether or not they cross a byte.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025, section 5.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.core.errors import KernelError

_WIDE = {
    "fp32": ("float", 32, 8, 23),
    "bf16": ("float", 16, 8, 7),
    "fp16": ("float", 16, 5, 10),
    "uint16": ("uint", 16, 0, 0),
    "int16": ("int", 16, 0, 0),
    "uint32": ("uint", 32, 0, 0),
    "int32": ("int", 32, 0, 0),
}


@dataclass(frozen=True, slots=True)
class TileType:
    """The type of an element.

    Args:
        kind: uint, int (two's complement) or float.
        bits: of an element.
        exponent: bits of the exponent of a float.
        mantissa: bits of the mantissa of a float.
    """

    kind: Literal["uint", "int", "float"]
    bits: int
    exponent: int = 0
    mantissa: int = 0

    def __post_init__(self) -> None:
        if self.kind == "float" and (
            self.bits != 1 + self.exponent + self.mantissa or self.exponent < 1 or self.mantissa < 0
        ):
            raise KernelError(
                f"type float{self.bits}_e{self.exponent}m{self.mantissa}: a sign, exponent and "
                f"mantissa are {1 + self.exponent + self.mantissa} bits; expected at least 1 bit "
                "of exponent, and all of them to be the bits of the type"
            )
        if not (1 <= self.bits <= 8 or str(self) in _WIDE):
            raise KernelError(
                f"type {self.kind} of {self.bits} bits: expected 1 to 8 bits, or one of "
                f"{', '.join(_WIDE)}"
            )
        if self.kind == "float" and self.bits < 3:
            # A sign and an exponent alone: 0 and one power of two; not a type of the field.
            raise KernelError(f"type {self}: expected floats of 3 to 8 bits")

    def __str__(self) -> str:
        for name, fields in _WIDE.items():
            if fields == (self.kind, self.bits, self.exponent, self.mantissa):
                return name
        tail = f"_e{self.exponent}m{self.mantissa}" if self.kind == "float" else ""
        return f"{self.kind}{self.bits}{tail}"

    @property
    def narrow(self) -> bool:
        """Of at most 8 bits: every code is in a table."""
        return self.bits <= 8

    @property
    def storage_bytes(self) -> int:
        """Bytes of an element on its own; narrow types take a byte then."""
        return max(1, self.bits // 8)

    def packed_bytes(self, count: int) -> int:
        """Bytes of so many elements in a dense stream."""
        return -(-count * self.bits // 8)

    def values(self) -> np.ndarray:
        """What each code means: fp64 [2^N]; NaN and infinity where a code is no number.

        Raises:
            KernelError: the type is wide.
        """
        if not self.narrow:
            raise KernelError(f"type {self}: has no table of values; expected at most 8 bits")
        return _values(self)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        values = self.values()
        return float(values[np.isfinite(values)].max())

    @property
    def magnitudes(self) -> np.ndarray:
        """Finite values of a float's codes without a sign, which grow with the code: fp64."""
        values = self.values()[: 2 ** (self.bits - 1)]
        finite: np.ndarray = values[np.isfinite(values)]
        return finite

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Codes, uint8, of numbers: to nearest, ties to even, beyond the ends saturated.

        Raises:
            KernelError: a number is NaN, which has no code; or the type is wide.
        """
        x = np.asarray(x, dtype=np.float64)
        if np.isnan(x).any():
            raise KernelError(f"type {self}: NaN cannot be encoded; expected numbers")
        values = self.values()
        if self.kind != "float":
            whole = np.clip(np.rint(x), values.min(), values.max()).astype(np.int64)
            return np.asarray(whole & (2**self.bits - 1), dtype=np.uint8)
        known = self.magnitudes
        between = (known[1:] + known[:-1]) / 2
        low = np.searchsorted(between, np.abs(x), side="left")
        high = np.searchsorted(between, np.abs(x), side="right")
        code = np.where(low % 2 == 0, low, high)
        sign = np.signbit(x).astype(np.int64) << (self.bits - 1)
        return np.asarray(code | sign, dtype=np.uint8)


@functools.cache
def _values(dtype: TileType) -> np.ndarray:
    codes = np.arange(2**dtype.bits)
    if dtype.kind == "uint":
        out = codes.astype(np.float64)
    elif dtype.kind == "int":
        out = np.where(codes < 2 ** (dtype.bits - 1), codes, codes - 2**dtype.bits) * 1.0
    else:
        half = 2 ** (dtype.bits - 1)
        size, power = codes % half, codes % half >> dtype.mantissa
        fraction = size % 2**dtype.mantissa / 2**dtype.mantissa
        bias = 2 ** (dtype.exponent - 1) - 1
        out = np.ldexp(fraction + (power > 0), np.maximum(power, 1) - bias)
        if dtype.exponent == 5:
            top = power == 2**dtype.exponent - 1
            out = np.where(top, np.where(fraction == 0, np.inf, np.nan), out)
        if (dtype.exponent, dtype.mantissa) == (4, 3):
            out = np.where(size == half - 1, np.nan, out)
        out = np.where(codes >= half, -out, out)
    out.setflags(write=False)
    return out


@functools.cache
def tile_type(name: str | TileType) -> TileType:
    """The type of a name: ``uint3``, ``int5``, ``float6_e3m2``, ``e2m1``, ``bf16``, ``fp32``.

    Raises:
        KernelError: there is no such type.
    """
    if isinstance(name, TileType):
        return name
    if name in _WIDE:
        kind, bits, exponent, mantissa = _WIDE[name]
        return TileType(kind, bits, exponent, mantissa)  # type: ignore[arg-type]
    match = re.fullmatch(r"(?:float(\d))?_?e(\d)m(\d)", name)
    if match:
        exponent, mantissa = int(match[2]), int(match[3])
        return TileType("float", int(match[1] or 1 + exponent + mantissa), exponent, mantissa)
    match = re.fullmatch(r"(uint|int)(\d+)", name)
    if match:
        return TileType(match[1], int(match[2]))  # type: ignore[arg-type]
    raise KernelError(
        f"type {name!r}: expected uint1 to uint8, int1 to int8, a float such as e2m1 or "
        f"float6_e3m2, or one of {', '.join(_WIDE)}"
    )


NARROW: tuple[TileType, ...] = (
    *(TileType("uint", bits) for bits in range(1, 9)),
    *(TileType("int", bits) for bits in range(1, 9)),
    *(
        TileType("float", bits, exponent, bits - 1 - exponent)
        for bits in range(3, 9)
        for exponent in range(1, bits)
    ),
)
"""Every type of 1 to 8 bits: 8 uint, 8 int, and all floats of 3 to 8 bits."""
