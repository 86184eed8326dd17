"""Products of odd int8 integers on the matrix tiles of the CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes

__all__ = ["AmxPlanes"]


@part
class AmxPlanes(NativePlanes):
    """``tdpbusd`` on tiles of 16 rows and 16 outputs, two by two.

    The weights of 32 outputs become int8 once for up to 256 rows.
    """

    backend: ClassVar[str] = "cpp_amx"
    engine: ClassVar[str] = "amx"
