"""Bytes with a scale for each block.

Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016 (scales of blocks);
Gupta et al., Deep Learning with Limited Numerical Precision, 2015 (random rounding).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.compress.packing import check_tensors
from shoal.fields.federate.protocols import UpdateRefusedError

_LARGEST = 127


@part
class Blocks8:
    """Send each number as 8 bits, rounded at random, and a scale for each block.

    Args:
        block: numbers that share a scale.
    """

    block: Annotated[int, Ge(8)] = 256

    kind: ClassVar = "unbiased"

    def omega(self, size: int) -> float:
        """A number is off by at most half a step of the block's largest one, in the mean square."""
        return 1 + min(self.block, size) / (4 * _LARGEST**2)

    def bits(self, size: int) -> int:
        """Of numbers and scales."""
        return 8 * size + 32 * self._blocks(size)

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """Codes uint8 [size], 127 above the number; scales float32 [blocks]."""
        padded = np.zeros(self._blocks(len(x)) * self.block, np.float32)
        padded[: len(x)] = x
        rows = padded.reshape(-1, self.block)
        scales = np.abs(rows).max(1) / np.float32(_LARGEST)
        steps = rows / np.where(scales > 0, scales, 1)[:, None]
        noise = generator(key, purpose="rounding of blocks").random(rows.shape, np.float32)
        codes = np.clip(np.floor(steps + noise), -_LARGEST, _LARGEST) + _LARGEST
        return {"codes": codes.astype(np.uint8).reshape(-1)[: len(x)], "scales": scales}

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """Codes times scales."""
        blocks = self._blocks(size)
        check_tensors(tensors, {"codes": ("uint8", (size,)), "scales": ("float32", (blocks,))})
        if (tensors["codes"] > 2 * _LARGEST).any():
            raise UpdateRefusedError(f"update: a code is above {2 * _LARGEST}")
        numbers = tensors["codes"].astype(np.float32) - np.float32(_LARGEST)
        return np.asarray(numbers * np.repeat(tensors["scales"], self.block)[:size])

    def _blocks(self, size: int) -> int:
        return -(-size // self.block)
