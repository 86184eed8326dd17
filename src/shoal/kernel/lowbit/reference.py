"""The meaning of ``linear_lowbit``: the weights that the codes mean, then a product in fp32."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.lowbit.base import LowbitKernel, checked
from shoal.kernel.protocols import PackedMatrix, Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class ReferenceLowbitLinear(LowbitKernel):
    """Dequantizes to fp32 once; product in fp32 (fp64 for fp64), rounded at the end; any format."""

    backend: ClassVar[str] = "reference"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    activations: ClassVar[tuple[str, ...]] = ("bipolar",)
    # It reads weights of 32 bits, of which the call counts few.
    rate: ClassVar[str | None] = "fp32"
    memory_share: ClassVar[float] = 0.06
    compute_share: ClassVar[float] = 0.05

    def _refuses(self, call: LowbitLinearCall) -> str | None:
        if call.activations and re.fullmatch(r"bipolar[1-8]", call.activations) is None:
            return "rounds its input to bipolar1 to bipolar8 only"
        return super()._refuses(call)

    def _prepare(
        self, call: LowbitLinearCall, weight: PackedMatrix, bias_N: Tensor | None = None
    ) -> Ready:
        import torch

        from shoal.kernel.planes.activations import bits_of, rounded

        wide = torch.float64 if call.dtype == "fp64" else torch.float32
        matrix = checked(call, weight).dequantize(weight).to(wide)
        bias = None if bias_N is None else bias_N.detach().to(wide)
        bits = bits_of(call.activations) if call.activations else 0

        def run(x_MK: Tensor) -> Tensor:
            x = rounded(x_MK.to(wide), bits) if bits else x_MK.to(wide)
            out = x @ matrix.T
            return (out if bias is None else out + bias).to(x_MK.dtype)

        return run
