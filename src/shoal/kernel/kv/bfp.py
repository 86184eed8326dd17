"""Block floating point: numbers side by side share an exponent.

One number that is much larger than its neighbours costs all of them their low bits; in keys
such numbers sit in the same channels of every token, and sorting the channels once
(:mod:`shoal.model.ksort`) puts them into blocks of their own.

Source: Accurate Block Quantization in LLMs with Outliers, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shoal.core.errors import KernelError, require
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor


@part
class BfpKVFormat:
    """``x = q * 2^(e - (m - 2))``, with q of m bits, sign included, and e shared by a block.

    ``e = floor(log2 max|x|)``, and ``q = clamp(round(x / step), +-(2^(m-1) - 1))``, to even at
    the half. Numbers below 2^-126 are zero. Stored: codes (bytes; two codes of 4 bits in a byte,
    the first half of a block in the low halves of its bytes, plus 8), and e + 127 as a byte.

    Args:
        bits: 12 or 16: the 8 of the exponent and m = 4 or 8 of the mantissa. A number takes
            m + 8 / block bits.
        block: numbers along the head dimension that share an exponent.
        ksort: order in which the channels of the keys are stored: unchanged (none), by the
            magnitude of their rotary pairs (pairs), or by the magnitude of each channel (free). It
            is computed once, when the model is loaded.
        by: source of the magnitude of a channel: weight, its row of the key projection; or
            calibration, its keys on text.
    """

    bits: int = 12
    block: int = 32
    ksort: Literal["none", "pairs", "free"] = "none"
    by: Literal["weight", "calibration"] = "weight"

    def __post_init__(self) -> None:
        require(
            self.bits in (12, 16),
            "kv_format.bfp.bits",
            self.bits,
            expected="12 (mantissas of 4 bits) or 16 (mantissas of 8 bits)",
            error=KernelError,
        )
        require(
            2 <= self.block <= 1024 and self.block & (self.block - 1) == 0,
            "kv_format.bfp.block",
            self.block,
            expected="a power of two from 2 to 1024",
            hint="32 is usual",
            error=KernelError,
        )

    def __str__(self) -> str:
        return f"bfp{self.bits}-b{self.block}"

    @property
    def mantissa(self) -> int:
        """Bits of a code, its sign among them."""
        return self.bits - 8

    def refuses(self, head_dim: int) -> str | None:
        if head_dim % self.block == 0:
            return None
        # The largest power of two that divides it.
        fits = min(1024, head_dim & -head_dim)
        return f"has blocks of {self.block}, which do not divide heads of {head_dim}" + (
            f"; the nearest block is {fits}" if fits >= 2 else ""
        )

    def _check(self, head_dim: int) -> None:
        reason = self.refuses(head_dim)
        if reason is not None:
            raise KernelError(f"cache format {self}: it {reason}")

    def token_bytes(self, head_dim: int, *, dtype_bytes: int) -> float:
        return head_dim * self.mantissa / 8 + head_dim / self.block

    def layout(self, head_dim: int, dtype: str) -> tuple[tuple[int, str], ...]:
        """Numbers a token and head, and their type, of every stored tensor.

        Raises:
            KernelError: the block does not divide the head.
        """
        self._check(head_dim)
        return ((head_dim * self.mantissa // 8, "uint8"), (head_dim // self.block, "uint8"))

    def encode(self, x_NKd: Tensor) -> tuple[Tensor, ...]:
        """Codes uint8 [N, K, d m / 8] and exponents uint8 [N, K, d / block].

        Raises:
            KernelError: a number is NaN or infinite, or the block does not divide d.
        """
        import torch

        from shoal.kernel.kv.common import fast, not_finite, side_by_side

        *rows, d = x_NKd.shape
        self._check(d)
        if fast(x_NKd):
            from shoal.kernel.native import function

            x, heads, stride = side_by_side(x_NKd)
            codes = x.new_empty((*rows, d * self.mantissa // 8), dtype=torch.uint8)
            exponents = x.new_empty((*rows, d // self.block), dtype=torch.uint8)
            bad = function("kv", "bfp_encode", "plllllllpp", "l")(
                x.data_ptr(),
                x.dtype == torch.bfloat16,
                x.numel() // d,
                heads,
                stride,
                d,
                self.block,
                self.mantissa,
                codes.data_ptr(),
                exponents.data_ptr(),
            )
            if bad >= 0:
                raise not_finite(x_NKd)
            return codes, exponents
        if not bool(torch.isfinite(x_NKd).all()):
            raise not_finite(x_NKd)
        codes_NKbn, e_NKb = self._codes(x_NKd.float().reshape(*rows, -1, self.block))
        exponents = (e_NKb + 127).to(torch.uint8)
        if self.mantissa == 8:
            return codes_NKbn.flatten(-2).to(torch.int8).view(torch.uint8), exponents
        low, high = (codes_NKbn + 8).to(torch.uint8).chunk(2, -1)
        return (low | high << 4).flatten(-2), exponents

    def _codes(self, x_NKbn: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        from shoal.kernel.kv.common import powers_of_two

        most = x_NKbn.abs().amax(-1)
        e = torch.where(most >= 2.0**-126, torch.frexp(most).exponent - 1, -127)
        by = powers_of_two(self.mantissa - 2 - e).masked_fill_(e == -127, 0.0)
        limit = 2 ** (self.mantissa - 1) - 1
        return (x_NKbn.double() * by.unsqueeze(-1)).round().clamp_(-limit, limit).long(), e

    def decode(self, *stored: Tensor) -> Tensor:
        import torch

        from shoal.core.native import compiler
        from shoal.kernel.kv.common import powers_of_two

        codes, exponents = stored
        *rows, blocks = exponents.shape
        d = blocks * self.block
        if codes.device.type == "cpu" and compiler() is not None:
            from shoal.kernel.native import function

            codes, exponents = codes.contiguous(), exponents.contiguous()
            out = codes.new_empty((*rows, d), dtype=torch.float32)
            function("kv", "bfp_decode", "ppllllp")(
                codes.data_ptr(),
                exponents.data_ptr(),
                out.numel() // d,
                d,
                self.block,
                self.mantissa,
                out.data_ptr(),
            )
            return out
        if self.mantissa == 8:
            q = codes.view(torch.int8).reshape(*rows, blocks, self.block).double()
        else:
            pairs = codes.reshape(*rows, blocks, self.block // 2)
            q = torch.cat([pairs & 15, pairs >> 4], -1).double() - 8
        by = powers_of_two(exponents.long() - 127 - (self.mantissa - 2))
        return (q * by.unsqueeze(-1)).float().flatten(-2)
