"""Powers of two.

Source: Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.compress.packing import (
    check_tensors,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from shoal.fields.federate.protocols import UpdateRefusedError

_WIDTH, _MANTISSA, _INFINITE = 9, 23, 255


@part
class NaturalRounding:
    """Round each number at random to one of the two powers of two beside it: sign and exponent."""

    kind: ClassVar = "unbiased"

    def omega(self, size: int) -> float:
        """9/8, reached at 4/3 of a power; numbers below 2^-126 aside."""
        return 9 / 8

    def bits(self, size: int) -> int:
        """A sign and eight bits of exponent for each number."""
        return _WIDTH * size

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """Signs and exponents, packed uint8."""
        raw = x.astype(np.float32).view(np.uint32)
        draw = generator(key, purpose="natural rounding")
        # The mantissa is the probability of the larger power, as a share of 2^23.
        up = draw.integers(0, 1 << _MANTISSA, len(x), np.uint32) < (raw & ((1 << _MANTISSA) - 1))
        codes = (raw >> _MANTISSA) + (up & ((raw >> _MANTISSA) % 256 < _INFINITE - 1))
        return {"codes": pack_bits(codes, _WIDTH)}

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """Zeros and powers of two."""
        check_tensors(tensors, {"codes": ("uint8", (packed_bytes(size, _WIDTH),))})
        codes = unpack_bits(tensors["codes"], size, _WIDTH)
        if (codes % 256 == _INFINITE).any():
            raise UpdateRefusedError("update: an exponent stands for no finite number")
        return (codes << _MANTISSA).view(np.float32)
