"""The meaning of ``linear``: every output is a sum, taken in fp32 or wider."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class ReferenceLinear(BaseKernel):
    """Plain torch in fp32 (fp64 for fp64), row by row, rounded once at the end.

    Slow; the bits of a row's product do not depend on the other rows or on the CPU.
    """

    op: ClassVar[str] = "linear"
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    gates: ClassVar[bool] = True
    rate: ClassVar[str | None] = "fp32"
    memory_share: ClassVar[float] = 0.1
    compute_share: ClassVar[float] = 0.05

    def _prepare(self, call: LinearCall, weight_NK: Tensor, bias_N: Tensor | None = None) -> Ready:
        import torch
        import torch.nn.functional as F

        from shoal.kernel.threads import torch_threads

        wide = torch.promote_types(weight_NK.dtype, torch.float32)
        weight, bias = weight_NK.to(wide), None if bias_N is None else bias_N.to(wide)

        def run(x_MK: Tensor) -> Tensor:
            rows_MK = x_MK.reshape(-1, call.k).to(wide)
            out = rows_MK.new_empty(len(rows_MK), call.n)
            # Several threads would take other sums, on some processors.
            with torch_threads(1):
                for row_K, out_N in zip(rows_MK, out, strict=True):
                    # A copy begins where every tensor does: the sums can depend on that.
                    out_N.copy_(torch.mv(weight, row_K.clone()))
            out = out.view(*x_MK.shape[:-1], call.n)
            out = (out if bias is None else out + bias).to(x_MK.dtype)
            if not call.gated:
                return out
            gate, up = out.to(wide).chunk(2, -1)
            return (F.silu(gate) * up).to(x_MK.dtype)

        return run
