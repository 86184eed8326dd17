"""Few rows: weights go from planes to int8 in registers, and pass by once."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes

__all__ = ["Gemv"]


@part
class Gemv(NativePlanes):
    """``vpdpbusd`` for up to four rows at a time, at the speed of memory.

    A permutation and a product with an 8 x 8 bit matrix make 64 values of any width.
    """

    backend: ClassVar[str] = "cpp_gemv"
    engine: ClassVar[str] = "gemv"
