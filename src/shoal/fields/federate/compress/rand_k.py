"""Some coordinates, drawn anew for each vector.

Source: Beznosikov et al., On Biased Compression for Distributed Learning, 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.compress.packing import check_tensors, kept


@part
class RandK:
    """Send a random share of the coordinates, scaled up so that the mean is right.

    Both ends draw the coordinates from the key, so only values are sent.

    Args:
        share: of the coordinates.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.05

    kind: ClassVar = "unbiased"

    def omega(self, size: int) -> float:
        """E|Q(x)|^2 is size / k times |x|^2."""
        return size / kept(self.share, size)

    def bits(self, size: int) -> int:
        """Of the values."""
        return 32 * kept(self.share, size)

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """Values float32 [k]."""
        return {"values": (x[self._drawn(len(x), key)] * self.omega(len(x))).astype(np.float32)}

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """The values in their places, zeros elsewhere."""
        check_tensors(tensors, {"values": ("float32", (kept(self.share, size),))})
        result = np.zeros(size, np.float32)
        result[self._drawn(size, key)] = tensors["values"]
        return result

    def _drawn(self, size: int, key: int) -> np.ndarray:
        draw = generator(key, purpose="coordinates that are sent")
        return draw.choice(size, kept(self.share, size), replace=False, shuffle=False)
