"""Keys and values in 8-bit integers, a scale for every token and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class Int8:
    """``round(x / scale)`` with ``scale = max|x| / 127`` in fp32, per token and head."""

    def __str__(self) -> str:
        return "int8"

    def refuses(self, head_dim: int) -> str | None:
        return None

    def token_bytes(self, head_dim: int, *, dtype_bytes: int) -> float:
        return float(head_dim + 4)

    def layout(self, head_dim: int, dtype: str) -> tuple[tuple[int, str], ...]:
        return ((head_dim, "int8"), (1, "fp32"))

    def encode(self, x_NKd: Tensor) -> tuple[Tensor, ...]:
        """Codes int8 [N, K, d] and scales fp32 [N, K, 1].

        Raises:
            KernelError: a number is NaN or infinite.
        """
        import torch

        from shoal.kernel.kv.common import fast, not_finite, side_by_side

        *rows, d = x_NKd.shape
        if fast(x_NKd):
            from shoal.kernel.native import function

            x, heads, stride = side_by_side(x_NKd)
            codes = x.new_empty(x.shape, dtype=torch.int8)
            scales = x.new_empty((*rows, 1), dtype=torch.float32)
            bad = function("kv", "int8_encode", "plllllpp", "l")(
                x.data_ptr(),
                x.dtype == torch.bfloat16,
                scales.numel(),
                heads,
                stride,
                d,
                codes.data_ptr(),
                scales.data_ptr(),
            )
            if bad >= 0:
                raise not_finite(x_NKd)
            return codes, scales
        if not bool(torch.isfinite(x_NKd).all()):
            raise not_finite(x_NKd)
        most = x_NKd.abs().amax(-1, keepdim=True).float()
        scales = torch.where(most < 1e-30, torch.zeros_like(most), most / 127)
        # A number over a tensor would be rounded twice, by way of the tensor's reciprocal.
        by = torch.where(scales == 0, torch.zeros_like(most), torch.full_like(most, 127) / most)
        codes = (x_NKd.float() * by).round().clamp_(-127, 127).to(torch.int8)
        return codes, scales

    def decode(self, *stored: Tensor) -> Tensor:
        codes, scales = stored
        return codes.float() * scales
