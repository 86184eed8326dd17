"""The largest coordinates.

Source: Alistarh et al., The Convergence of Sparsified Gradient Methods, 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.compress.packing import (
    bits_for,
    check_tensors,
    kept,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from shoal.fields.federate.protocols import UpdateRefusedError


@part
class TopK:
    """Send the share of the coordinates that are largest in magnitude, with their places.

    Args:
        share: of the coordinates.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.05

    kind: ClassVar = "contractive"

    def omega(self, size: int) -> float:
        """The rest has at most 1 - k / size of |x|^2."""
        return size / kept(self.share, size)

    def bits(self, size: int) -> int:
        """Of each value, and of its place in ceil(log2 size) bits."""
        return kept(self.share, size) * (32 + bits_for(size))

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """Values float32 [k], and packed places uint8."""
        places = np.sort(
            np.argpartition(-np.abs(x), kept(self.share, len(x)) - 1)[: kept(self.share, len(x))]
        )
        return {
            "values": x[places].astype(np.float32),
            "places": pack_bits(places, bits_for(len(x))),
        }

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """The values in their places, zeros elsewhere."""
        count, width = kept(self.share, size), bits_for(size)
        check_tensors(
            tensors,
            {"values": ("float32", (count,)), "places": ("uint8", (packed_bytes(count, width),))},
        )
        places = unpack_bits(tensors["places"], count, width)
        if places[-1] >= size or (np.diff(places.astype(np.int64)) <= 0).any():
            raise UpdateRefusedError(f"update: places are not increasing numbers below {size}")
        result = np.zeros(size, np.float32)
        result[places] = tensors["values"]
        return result
