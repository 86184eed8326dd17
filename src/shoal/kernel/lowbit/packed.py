"""Products with 8-bit weights in panels, in the order in which products read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats.integer import Int
from shoal.kernel.lowbit.base import LowbitKernel, checked, require_rows
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat


@part
class PackedBytes(LowbitKernel):
    """AVX-512 dot products of bf16, for which bytes are looked up: ``int8-channel``.

    A code of 8 bits is half a step beside a number of 7 bits and a sign, whose two bytes in bf16
    are in tables of 128; half of the sum of a row makes up for it. Up to twelve rows share what was
    looked up. Sums are taken in one order, whatever the number of rows.
    """

    backend: ClassVar[str] = "packed"
    invariant: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    needs: ClassVar[frozenset[str]] = frozenset(
        {"avx512f", "avx512bw", "avx512_bf16", "avx512vbmi"}
    )
    compiled: ClassVar[bool] = True
    # A vector does twice as many operations in bf16 as in fp32; the rate of bf16 may be of tiles.
    rate: ClassVar[str] = "fp32"
    memory_share: ClassVar[float] = 0.95
    compute_share: ClassVar[float] = 1.85

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        if isinstance(stored, Int) and str(stored) == "int8-channel":
            return None
        return "reads int8-channel only"

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch
        import torch.nn.functional as F

        from shoal.kernel.native import function
        from shoal.kernel.pages import room
        from shoal.kernel.tensors import constant

        n, k = call.n, call.k
        checked(call, weight)
        short = -k % 32
        codes = weight.tensors["codes"].contiguous()
        scales = weight.tensors["scales"].float().view(-1).contiguous()
        bias = None if bias_N is None else constant("bias", bias_N.float(), (n,), torch.float32)
        packed = room(-(-n // 32) * 32 * (k + short))
        function("linear_packed", "pack_bytes", "ppll")(codes.data_ptr(), packed.data_ptr(), n, k)
        run = function("linear_packed", "linear_bytes", "pppp" + "pplll")
        fixed = packed.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr()

        def product(x: Tensor) -> Tensor:
            require_rows(call, x, torch.bfloat16)
            rows = x.numel() // k
            x = F.pad(x, (0, short)) if short else x.contiguous()
            out, halves = x.new_empty(*x.shape[:-1], n), x.new_empty(rows, dtype=torch.float32)
            run(x.data_ptr(), *fixed, halves.data_ptr(), out.data_ptr(), rows, n, k + short)
            return out

        # The memory that the addresses are of lives as long as the function.
        product.constants = (packed, scales, bias)  # type: ignore[attr-defined]
        return product
