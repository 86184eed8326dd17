"""Root-mean-square normalisation.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.kernel.fused.torch_training import norm as rms_norm
from shoal.kernel.protocols import Ready

__all__ = ["RMSNorm", "rms_norm"]


class RMSNorm(nn.Module):
    """RMS norm with a weight per dimension."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernel: Ready | None = None  # of inference: see shoal.model.accelerate
        self.trained: Ready | None = None  # of training: see shoal.model.trained

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if self.kernel is not None:
            fast: Tensor = self.kernel(x)
            return fast
        if self.trained is not None:
            fused: Tensor = self.trained(x, self.weight)
            return fused
        return rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """``x + branch`` and that normalised; x may change."""
        if branch is None:
            return x, self(x)
        if self.kernel is not None:
            return x, self.kernel(x, branch)
        x = x + branch
        return x, self(x)
