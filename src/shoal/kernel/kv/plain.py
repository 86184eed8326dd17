"""Keys and values as the model computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class Plain:
    """No quantization: numbers are stored in the dtype of the computation."""

    def __str__(self) -> str:
        return "plain"

    def refuses(self, head_dim: int) -> str | None:
        return None

    def token_bytes(self, head_dim: int, *, dtype_bytes: int) -> float:
        return float(head_dim * dtype_bytes)

    def layout(self, head_dim: int, dtype: str) -> tuple[tuple[int, str], ...]:
        return ((head_dim, dtype),)

    def encode(self, x_NKd: Tensor) -> tuple[Tensor, ...]:
        return (x_NKd,)

    def decode(self, *stored: Tensor) -> Tensor:
        """[N, K, d] in fp32, or fp64 if it was."""
        import torch

        wide: Tensor = stored[0].to(torch.promote_types(stored[0].dtype, torch.float32))
        return wide
