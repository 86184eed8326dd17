"""Random rounding to levels between zero and the norm.

Source: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.compress.packing import (
    bits_for,
    check_tensors,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from shoal.fields.federate.protocols import UpdateRefusedError


@part
class Dithering:
    """Send the norm, and of each number its sign and a level (QSGD).

    Args:
        levels: between zero and the norm.
    """

    levels: Annotated[int, Ge(1), Le(1 << 20)] = 16

    kind: ClassVar = "unbiased"

    def omega(self, size: int) -> float:
        """The smaller of two bounds: for few numbers, and for many."""
        return 1 + min(size / self.levels**2, math.sqrt(size) / self.levels)

    def bits(self, size: int) -> int:
        """The norm, and one of 2 levels + 1 values for each number."""
        return 32 + size * bits_for(2 * self.levels + 1)

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """The norm float32 [1], and packed levels uint8; ``levels`` stands for zero."""
        norm = np.float32(np.linalg.norm(x.astype(np.float64)))
        if not np.isfinite(norm) or norm == 0:
            scaled = np.zeros(len(x))
        else:
            scaled = np.clip(x.astype(np.float64) / float(norm), -1, 1) * self.levels
        draw = generator(key, purpose="dithering")
        level = np.floor(scaled + draw.random(len(x))).astype(np.int64)
        codes = np.clip(level, -self.levels, self.levels) + self.levels
        return {
            "norm": np.array([norm], np.float32),
            "levels": pack_bits(codes, bits_for(2 * self.levels + 1)),
        }

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """Levels times the norm."""
        width = bits_for(2 * self.levels + 1)
        check_tensors(
            tensors,
            {"norm": ("float32", (1,)), "levels": ("uint8", (packed_bytes(size, width),))},
        )
        codes = unpack_bits(tensors["levels"], size, width).astype(np.int64)
        if (codes > 2 * self.levels).any():
            raise UpdateRefusedError(f"update: a level is above {self.levels}")
        return ((codes - self.levels) * (float(tensors["norm"][0]) / self.levels)).astype(
            np.float32
        )
