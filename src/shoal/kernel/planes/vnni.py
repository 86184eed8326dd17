"""Products of odd int8 integers, made of planes for 32 outputs at a time."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.planes.base import NativePlanes

__all__ = ["Vnni"]


@part
class Vnni(NativePlanes):
    """``vpdpbusd`` on codes of the input and values of the weights, eight rows at a time.

    Eight bits do not fit in int8: such weights are a topmost plane and seven bits.
    """

    backend: ClassVar[str] = "cpp_vnni"
    engine: ClassVar[str] = "vnni"
