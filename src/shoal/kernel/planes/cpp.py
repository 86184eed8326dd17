"""The kernels of ``matmul_planes`` in C++, one for each of :mod:`~shoal.kernel.planes.engines`."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes


@part
class Popcnt(NativePlanes):
    """Bit counts, K - 2 popcount(w xor x): three instructions for 512 one-bit products.

    All w x a products of planes for four rows and 32 outputs are summed in registers, highest power
    first, so no product of two planes is written to memory. Constant first or last planes are
    skipped.
    """

    backend: ClassVar[str] = "cpp_popcnt"
    engine: ClassVar[str] = "popcnt"


@part
class Gemv(NativePlanes):
    """``vpdpbusd`` for up to four rows at a time; weights are read once.

    A permutation and an 8 x 8 bit-matrix product unpack 64 values of any width.
    """

    backend: ClassVar[str] = "cpp_gemv"
    engine: ClassVar[str] = "gemv"


@part
class Vnni(NativePlanes):
    """``vpdpbusd`` on input codes and weight values, eight rows at a time.

    Bipolar integers of 8 bits do not fit in int8: such weights are split into the top plane and
    seven bits.
    """

    backend: ClassVar[str] = "cpp_vnni"
    engine: ClassVar[str] = "vnni"


@part
class AmxPlanes(NativePlanes):
    """``tdpbusd`` on tiles of 16 rows and 16 outputs, two by two.

    The weights of 32 outputs are converted to int8 once for up to 256 rows.
    """

    backend: ClassVar[str] = "cpp_amx"
    engine: ClassVar[str] = "amx"
