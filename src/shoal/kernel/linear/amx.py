"""The product of any number of rows with a matrix, by the matrix tiles of a CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import LinearCall
from shoal.kernel.linear.panels import PanelLinear
from shoal.kernel.native.tiles import TILES, has_tiles


@part
class AmxLinear(PanelLinear):
    """AMX products of tiles of 16 x 32 bf16 numbers.

    Few rows run at the memory bandwidth, many rows at a third to half of the peak of the AMX units.
    """

    backend: ClassVar[str] = "amx"
    source: ClassVar[str] = "linear_amx"
    needs: ClassVar[frozenset[str]] = TILES | {"avx512f", "avx512bw", "avx512_bf16"}
    memory_share: ClassVar[float] = 0.95
    compute_share: ClassVar[float] = 0.4

    def refuses(self, call: LinearCall) -> str | None:
        reason = super().refuses(call)
        if reason is None and not has_tiles():
            return "needs AMX tiles, which the operating system does not permit"
        return reason
