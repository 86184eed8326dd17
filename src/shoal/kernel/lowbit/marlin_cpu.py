"""Products with 4-bit weights at the speed at which memory gives the weights.

Source: Frantar et al., MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
Language Models, 2024.

A product of few rows costs what its weights cost to read; 4-bit weights are a quarter. That
holds only if unpacking and multiplying hide behind reading, at every number of rows. Where the
CPU has matrix tiles (AMX), a segment of weights is unpacked into the first cache while the
tiles multiply the one before; elsewhere vectors do it, with up to 16 rows in registers.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats.integer import Int
from shoal.kernel.formats.normal import Nf
from shoal.kernel.lowbit.base import LowbitKernel, checked, require_rows
from shoal.kernel.native.tiles import has_tiles
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat

_SEGMENTS = (256, 128, 64, 32)


def library() -> str:
    """The native library whose kernels this CPU runs fastest."""
    return "lowbit_amx" if has_tiles() else "lowbit"


def segment_of(k: int, group: int) -> int:
    """Weights of a segment of rows of ``k`` weights of which ``group`` share a scale.

    Raises:
        KernelError: no segment fills the group; names the nearest group of which one does.
    """
    if group == k:
        # Rows are filled up with zeros, as few as 32 need.
        return next(s for s in _SEGMENTS if -(-k // s) * s == -(-k // 32) * 32)
    if group % 32:
        low = group // 32 * 32
        near = f"{low} or {low + 32}" if low else "32"
        raise KernelError(
            f"groups of {group} of K = {k} weights: expected a multiple of 32; nearest {near}"
        )
    return next(s for s in _SEGMENTS if group % s == 0)


class _Int4(LowbitKernel):
    normal: ClassVar[bool] = False

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        if isinstance(stored, Nf):
            if not self.normal:
                return "computes with integers, and nf4 codes are not integers"
            if call.dtype != "bf16":
                return f"has the values of nf4 in bf16, which is less precise than {call.dtype}"
        elif not isinstance(stored, Int) or stored.width != 4:
            return "reads int4 with groups, channels or 2:4 only"
        segment_of(call.k, group)
        return None


class _Marlin(_Int4):
    invariant: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset(
        {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"}
    )
    compiled: ClassVar[bool] = True
    rate: ClassVar[str | None] = "bf16"
    memory_share: ClassVar[float] = 0.6
    compute_share: ClassVar[float] = 0.3
    symbol: ClassVar[str]

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        from shoal.kernel.lowbit.marlin import blocks
        from shoal.kernel.native import function
        from shoal.kernel.tensors import constant

        n, k = call.n, call.k
        checked(call, weight)
        made = blocks(weight)
        bias = None if bias_N is None else constant("bias", bias_N.float(), (n,), torch.float32)
        run = function(library(), f"{self.symbol}_{call.dtype}", "pppl")
        header = made.header(bias)
        address = ctypes.addressof(header)
        dtype = torch.bfloat16 if call.dtype == "bf16" else torch.float32

        def product(x: Tensor) -> Tensor:
            require_rows(call, x, dtype)
            x = x.contiguous()
            out = x.new_empty(*x.shape[:-1], n)
            run(address, x.data_ptr(), out.data_ptr(), x.numel() // k)
            return out

        # The memory that the addresses are of lives as long as the function.
        product.constants = (made, bias, header)  # type: ignore[attr-defined]
        return product


@part
class W4A16(_Marlin):
    """Converts codes to bf16 with a table; the fp32 sum of each segment is scaled.

    The order of summation is fixed: the bits of a row's result depend neither on the other rows nor
    on the number of threads. fp32 rows are split exactly into the sum of three bf16 rows. ``nf4``
    needs bf16 rows.
    """

    backend: ClassVar[str] = "cpp_w4a16"
    symbol: ClassVar[str] = "w4a16"
    normal: ClassVar[bool] = True


class _Rounding(_Int4):
    """Of calls that ask for rows rounded to int8."""

    activations: ClassVar[tuple[str, ...]] = ("int",)

    def _refuses(self, call: LowbitLinearCall) -> str | None:
        if call.activations != "int8":
            return "rounds its input to int8, which the call does not allow"
        return super()._refuses(call)


@part
class W4A8(_Rounding, _Marlin):
    """Quantizes rows to int8 with a scale per segment; sums of a segment are exact integers.

    Half the work of :class:`W4A16` for many rows. Rows are rounded to 8 bits, so it accepts only
    calls with ``activations="int8"``; the result equals that of :class:`Integer`.
    """

    backend: ClassVar[str] = "cpp_w4a8"
    rate: ClassVar[str | None] = "int8"
    symbol: ClassVar[str] = "w4a8"


@part
class Integer(_Rounding):
    """The definition of ``activations="int8"`` in plain torch; slow."""

    backend: ClassVar[str] = "integer"
    memory_share: ClassVar[float] = 0.02
    compute_share: ClassVar[float] = 0.02

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        from shoal.kernel.lowbit.marlin import product_w4a8

        checked(call, weight)

        def product(x: Tensor) -> Tensor:
            out = product_w4a8(x.reshape(-1, call.k), weight, bias_N)
            return out.view(*x.shape[:-1], call.n)

        return product
