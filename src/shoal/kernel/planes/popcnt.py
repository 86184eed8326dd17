"""Products of planes by counting bits: K - 2 popcount(w xor x)."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes

__all__ = ["Popcnt"]


@part
class Popcnt(NativePlanes):
    """An exclusive or, a count and an addition for 512 products of one bit.

    All w x a products of four rows and 32 outputs meet in registers, highest power first:
    no product of two planes is ever written. Planes at either end that are constant are not
    multiplied.
    """

    backend: ClassVar[str] = "cpp_popcnt"
    engine: ClassVar[str] = "popcnt"
