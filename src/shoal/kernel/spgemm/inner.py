"""Inner products: every row of A with every column of B, whether they meet or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.spgemm.base import SparseKernel
from shoal.kernel.spgemm.call import SpGemm

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.spgemm.csr import Csr


@part
class Inner(SparseKernel):
    """Inner products: expands a row of A once and multiplies each column of B with it.

    Fastest with a mask of few entries; slowest for a full result.
    """

    backend: ClassVar[str] = "inner"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    masks: ClassVar[bool] = True
    multiply_s: ClassVar[float] = 1e-9
    call_s: ClassVar[float] = 1e-4

    def work(self, call: SpGemm) -> float:
        """Entries of B once for every row of A; a mask's share of them is not known ahead."""
        return float(call.m) * call.nnz_b

    def _refuses(self, call: SpGemm) -> str | None:
        if call.keep:
            return "writes only entries of the mask with at least one product"
        return SparseKernel._refuses(self, call)

    def _prepare(self, call: SpGemm, *constants: object) -> Ready:
        import torch

        from shoal.kernel.native import function
        from shoal.kernel.spgemm import native
        from shoal.kernel.spgemm.csr import Counters, Csr, multiplies, transposed

        begin = function("spgemm_inner", f"inner_begin_{call.dtype}", "plppp", "p")
        end = function("spgemm_inner", f"inner_end_{call.dtype}", "ppp")

        def run(A: Csr, B: Csr, mask: Csr | None = None, alpha: Tensor | None = None) -> Csr:
            each_M, total = multiplies(A, B)
            columns, _ = transposed(B)
            ptr_M = torch.empty(A.shape[0] + 1, dtype=torch.int64)
            counts = native.no_counts()
            made = native.job(
                A, B, multiplies_M=each_M, ptr_M=ptr_M, col=0, val=0, counts=counts, mask=mask,
                alpha=alpha,
            )  # fmt: skip
            turned = (t.data_ptr() for t in (columns.ptr, columns.col, columns.val))
            held = begin(made, B.shape[0], *turned)
            nnz = int(ptr_M[-1])
            col_E = torch.empty(nnz, dtype=torch.int32)
            val_E = torch.empty(nnz, dtype=A.val.dtype)
            end(held, col_E.data_ptr(), val_E.data_ptr())
            size = columns.col.nbytes + columns.val.nbytes + col_E.nbytes + val_E.nbytes
            return Csr((A.shape[0], B.shape[1]), ptr_M, col_E, val_E, Counters(total, size))

        return run
