"""What a layer was given on the calibration text, as far as quantizers look at it.

Shapes: K inputs of the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Inputs:
    """Sums over the inputs of one layer.

    Args:
        k: length of an input.
        device: where it is summed.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.gram_KK = torch.zeros(k, k, device=device)
        self._sizes_K = torch.zeros(k, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Add inputs [..., K]."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.count += len(rows)
        self.gram_KK.addmm_(rows.T, rows)
        self._sizes_K += rows.abs().sum(0, dtype=torch.float64)

    @property
    def size(self) -> Tensor:
        """Mean magnitude of each input [K], fp32."""
        return (self._sizes_K / max(1, self.count)).float()

    @property
    def importance(self) -> Tensor:
        """Mean square of each input over the mean of all [K], fp32; 1 where nothing was seen."""
        squares = self.gram_KK.diagonal()
        mean = squares.mean()
        return squares / mean if float(mean) > 0 else torch.ones_like(squares)
