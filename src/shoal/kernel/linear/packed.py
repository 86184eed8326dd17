"""The product of any number of rows with a packed matrix, by the vectors of a CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.linear.panels import PanelLinear


@part
class PackedLinear(PanelLinear):
    """AVX-512 bf16 dot products of up to twelve rows at a time with a packed panel of weights.

    Few rows run at the memory bandwidth, many rows at nine tenths of the peak of the vector units.
    """

    backend: ClassVar[str] = "packed"
    source: ClassVar[str] = "linear_packed"
    needs: ClassVar[frozenset[str]] = frozenset({"avx512f", "avx512bw", "avx512_bf16"})
    # A vector does twice as many operations in bf16 as in fp32; the rate of bf16 may be of tiles.
    rate: ClassVar[str] = "fp32"
    memory_share: ClassVar[float] = 0.95
    compute_share: ClassVar[float] = 1.95
