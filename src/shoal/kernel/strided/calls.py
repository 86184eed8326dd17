"""What is asked of ``pack`` and ``unpack``: where the bytes lie. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shoal.kernel.strided.canonical import Layout


@dataclass(frozen=True, slots=True)
class Pack:
    """``ready(buffer, out=None) -> uint8 [size]``: the bytes of a layout behind each other.

    Offsets of the layout are from the buffer's own address. ``out`` is a contiguous tensor of
    ``size`` bytes.
    """

    op: ClassVar[str] = "pack"
    layout: Layout
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def moved_bytes(self) -> float:
        """The lines that hold the bytes are read, the packed bytes written."""
        return float(self.layout.touched + self.layout.size)


@dataclass(frozen=True, slots=True)
class Unpack:
    """``ready(packed, buffer) -> buffer``: packed bytes to their places; no other is touched."""

    op: ClassVar[str] = "unpack"
    layout: Layout
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def moved_bytes(self) -> float:
        """The packed bytes are read, the lines that hold them written."""
        return float(self.layout.touched + self.layout.size)
