"""The kernels of ``matmul_planes`` in C++, one for each of :mod:`~shoal.kernel.planes.engines`."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes


@part
class Popcnt(NativePlanes):
    """Counts bits, K - 2 popcount(w xor x): three instructions for 512 products of one bit.

    All w x a products of four rows and 32 outputs meet in registers, highest power first:
    no product of two planes is ever written. Planes at either end that are constant are not
    multiplied.
    """

    backend: ClassVar[str] = "cpp_popcnt"
    engine: ClassVar[str] = "popcnt"


@part
class Gemv(NativePlanes):
    """``vpdpbusd`` for up to four rows at a time, whose weights pass by once.

    A permutation and a product with an 8 x 8 bit matrix make 64 values of any width.
    """

    backend: ClassVar[str] = "cpp_gemv"
    engine: ClassVar[str] = "gemv"


@part
class Vnni(NativePlanes):
    """``vpdpbusd`` on codes of the input and values of the weights, eight rows at a time.

    Eight bits do not fit in int8: such weights are a topmost plane and seven bits.
    """

    backend: ClassVar[str] = "cpp_vnni"
    engine: ClassVar[str] = "vnni"


@part
class AmxPlanes(NativePlanes):
    """``tdpbusd`` on tiles of 16 rows and 16 outputs, two by two.

    The weights of 32 outputs become int8 once for up to 256 rows.
    """

    backend: ClassVar[str] = "cpp_amx"
    engine: ClassVar[str] = "amx"
