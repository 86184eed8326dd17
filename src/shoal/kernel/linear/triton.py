"""The product of a few rows with a matrix on a GPU, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class TritonLinear(TritonKernel):
    """One program per sixteen rows and tile of outputs, with a fixed order of summation over K.

    Args:
        block_n: outputs per program.
        block_k: inputs per load.
    """

    op: ClassVar[str] = "linear"
    invariant: ClassVar[bool] = True

    block_n: int = 64
    block_k: int = 128

    def _prepare(self, call: LinearCall, weight_NK: Tensor, bias_N: Tensor | None = None) -> Ready:
        import torch

        from shoal.kernel.linear.triton_code import product
        from shoal.kernel.tensors import constant, dtype_of

        n, k = call.n, call.k
        weight = constant("weight", weight_NK, (n, k), dtype_of(call.dtype))
        bias = None if bias_N is None else constant("bias", bias_N.float(), (n,), torch.float32)

        def run(x: Tensor) -> Tensor:
            rows = x.numel() // k
            out = x.new_empty(*x.shape[:-1], n)
            grid = (-(-rows // 16), -(-n // self.block_n))
            # Triton's interpreter does not multiply bf16.
            product[grid](
                x.contiguous(), weight, weight if bias is None else bias, out, rows, n, k,
                bias is not None, self.interpreted(call), 16, self.block_n, self.block_k,
            )  # fmt: skip
            return out

        return run
