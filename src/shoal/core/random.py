"""One counter-based source of randomness.

Every random number of a run is a function of ``(seed, step, layer, index)`` and of
what it is for, never of the rank that happens to draw it or of how often something
was drawn before. So runs are the same on any number of ranks and after any resume,
and there is no generator state to save.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (Philox).
"""

from __future__ import annotations

import hashlib

import numpy as np


def _words(purpose: str, seed: int, step: int, layer: int, index: int) -> np.ndarray:
    text = f"{purpose}|{seed}|{step}|{layer}|{index}".encode()
    return np.frombuffer(hashlib.sha256(text).digest(), dtype=np.uint64)


def generator(
    seed: int, *, purpose: str = "", step: int = 0, layer: int = 0, index: int = 0
) -> np.random.Generator:
    """A NumPy generator that starts at the place named by its key.

    Args:
        seed: seed of the run.
        purpose: what the numbers are for, so that two uses never share them.
        step: global step.
        layer: layer number.
        index: global index of the sample, parameter or token.
    """
    words = _words(purpose, seed, step, layer, index)
    return np.random.Generator(np.random.Philox(key=words[:2]))


def seed64(seed: int, *, purpose: str = "", step: int = 0, layer: int = 0, index: int = 0) -> int:
    """A 63-bit seed for a foreign generator (``torch.Generator.manual_seed``)."""
    return int(_words(purpose, seed, step, layer, index)[0] >> np.uint64(1))


class Permutation:
    """A pseudo-random permutation of ``range(size)`` that is never stored.

    A four-round Feistel network over the next even power of two, walked until the
    value falls inside the range, so any element costs O(1) and a run can start in
    the middle of an epoch.

    Args:
        seed: seed of the run.
        epoch: which shuffle.

    Source: Luby and Rackoff, 1988; cycle walking: Black and Rogaway, 2002.
    """

    rounds = 4

    def __init__(self, size: int, seed: int, epoch: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements; at least 1 is needed")
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = generator(seed, purpose="permutation", step=epoch).integers(
            0, 2**63, self.rounds, dtype=np.uint64
        )

    def _round(self, right: np.ndarray, key: np.uint64) -> np.ndarray:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
        return np.asarray((mixed ^ (mixed >> np.uint64(32))) & self._mask)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Elements at ``positions``, int64 of any shape, each in ``[0, size)``."""
        values = np.asarray(positions, dtype=np.uint64)
        if values.size and int(values.max()) >= self.size:
            raise ValueError(f"position {int(values.max())} in a permutation of {self.size}")
        pending = np.ones(values.shape, dtype=bool)
        values = values.copy()
        with np.errstate(over="ignore"):
            while pending.any():
                left = values[pending] >> self._half
                right = values[pending] & self._mask
                for key in self._keys:
                    left, right = right, left ^ self._round(right, key)
                values[pending] = (left << self._half) | right
                pending = values >= self.size
        return values.astype(np.int64)
