"""The product of a few rows with a matrix, at the speed at which memory gives the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class CppLinear(BaseKernel):
    """AVX-512 dot products of whole rows, with four outputs and up to six rows at a time.

    The order of summation is fixed: the bits of a row's result do not depend on the other rows.
    """

    op: ClassVar[str] = "linear"
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"avx512f", "avx512bw", "avx512_bf16"})
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.85
    compute_share: ClassVar[float] = 0.25

    def _prepare(self, call: LinearCall, weight_NK: Tensor, bias_N: Tensor | None = None) -> Ready:
        import torch

        from shoal.kernel.native import function
        from shoal.kernel.tensors import constant, dtype_of

        n, k = call.n, call.k
        weight = constant("weight", weight_NK, (n, k), dtype_of(call.dtype))
        bias = None if bias_N is None else constant("bias", bias_N.float(), (n,), torch.float32)
        run = function("linear", f"linear_{call.dtype}", "pppplll")
        at, bias_at = weight.data_ptr(), 0 if bias is None else bias.data_ptr()

        def product(x: Tensor) -> Tensor:
            rows = x.numel() // k
            x = x.contiguous()
            out = x.new_empty(*x.shape[:-1], n)
            run(x.data_ptr(), at, bias_at, out.data_ptr(), rows, n, k)
            return out

        # The memory that the addresses are of lives as long as the function.
        product.constants = (weight, bias)  # type: ignore[attr-defined]
        return product
