"""Every number as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.compress.packing import check_tensors


@part
class Identity:
    """Send float32 numbers."""

    kind: ClassVar = "unbiased"

    def omega(self, size: int) -> float:
        """E|Q(x)|^2 is |x|^2."""
        return 1.0

    def bits(self, size: int) -> int:
        """Of all numbers."""
        return 32 * size

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """The vector."""
        return {"delta": x.astype(np.float32, copy=False)}

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """The vector."""
        check_tensors(tensors, {"delta": ("float32", (size,))})
        return tensors["delta"]
