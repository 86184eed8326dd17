"""What PyTorch itself makes of weights of few bits: its 4-bit product, and its bf16 product."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.ir import Estimate, Machine
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall, LowbitLinearCall
from shoal.kernel.lowbit.base import LowbitKernel, checked, refuses_groups
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat


@part
class LibraryLowbitLinear(LowbitKernel):
    """``torch.ops.aten._weight_int4pack_mm_for_cpu``; for bf16 rows it rounds scales to bf16."""

    backend: ClassVar[str] = "torch"
    memory_share: ClassVar[float] = 0.3
    compute_share: ClassVar[float] = 0.15

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        reason = refuses_groups(stored, group)
        if reason is None and call.n % 16:
            reason = f"needs a multiple of 16 outputs; nearest {-(-call.n // 16) * 16}"
        return reason

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        stored = checked(call, weight)
        dtype = torch.bfloat16 if call.dtype == "bf16" else torch.float32
        group = stored.group_of(call.k)
        codes = stored.unpack(weight).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = weight.tensors["scales"].to(dtype)
        # The operator's own zero is code 8, as ours is; what is added to it is 0.
        pairs = torch.stack((scales, torch.zeros_like(scales)), -1).transpose(0, 1).contiguous()
        bias = None if bias_N is None else bias_N.detach().to(dtype)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        n, k = call.n, call.k

        def product(x: Tensor) -> Tensor:
            out: Tensor = multiply(x.reshape(-1, k), packed, group, pairs)
            if bias is not None:
                out = out + bias
            return out.view(*x.shape[:-1], n)

        return product


@part
class Dequantised(LowbitKernel):
    """Dequantizes to bf16 (fp32 for fp32 rows) once and calls PyTorch's product; for many rows.

    Supports any format; the layer then takes as much memory as an unquantized one.
    """

    backend: ClassVar[str] = "dequantised"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def estimate(self, call: LowbitLinearCall, machine: Machine) -> Estimate:
        """What ``linear.torch`` costs."""
        return self._dense().estimate(self._call(call), machine)

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        dtype = torch.bfloat16 if call.dtype == "bf16" else torch.float32
        matrix = checked(call, weight).dequantize(weight).to(dtype)
        bias = None if bias_N is None else bias_N.detach().to(dtype)
        return self._dense().prepare(self._call(call), matrix, bias)

    @staticmethod
    def _call(call: LowbitLinearCall) -> LinearCall:
        return LinearCall(call.m, call.n, call.k, call.dtype, call.device)

    @staticmethod
    def _dense() -> BaseKernel:
        from shoal.kernel.linear.library import LibraryLinear as Dense

        return Dense()
