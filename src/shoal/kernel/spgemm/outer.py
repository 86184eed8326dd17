"""Outer products: all products are kept, then sorted and summed.

Source: Pal et al., OuterSPACE: An Outer Product Based Sparse Matrix Multiplication Accelerator,
2018.
"""

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
class Outer(SparseKernel):
    """Outer products: each column of A times each row of B, with memory for all products."""

    backend: ClassVar[str] = "outer"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    multiply_s: ClassVar[float] = 1.2e-8
    call_s: ClassVar[float] = 1e-4

    def _prepare(self, call: SpGemm, *constants: object) -> Ready:
        import torch

        from shoal.kernel.native import function
        from shoal.kernel.spgemm import native
        from shoal.kernel.spgemm.csr import Counters, Csr, multiplies, transposed

        places = function("spgemm_check", "csr_places", "lpppp")
        expand = function("spgemm_outer", f"outer_expand_{call.dtype}", "plppppp")
        gather = function("spgemm_outer", f"outer_gather_{call.dtype}", "pppp")

        def run(A: Csr, B: Csr, mask: Csr | None = None, alpha: Tensor | None = None) -> Csr:
            each_M, total = multiplies(A, B)
            by_column, entry_E = transposed(A)
            place_E = torch.empty(A.nnz + 1, dtype=torch.int64)
            a_ptr, a_col, b_ptr = A.ptr.data_ptr(), A.col.data_ptr(), B.ptr.data_ptr()
            places(A.shape[0], a_ptr, a_col, b_ptr, place_E.data_ptr())
            ptr_M = torch.empty(A.shape[0] + 1, dtype=torch.int64)
            col_P = torch.empty(total, dtype=torch.int32)
            val_P = torch.empty(total, dtype=A.val.dtype)
            counts = native.no_counts()

            def made(col: int, val: int) -> object:
                return native.job(
                    A, B, multiplies_M=each_M, ptr_M=ptr_M, col=col, val=val, counts=counts,
                    alpha=alpha,
                )  # fmt: skip

            products = col_P.data_ptr(), val_P.data_ptr()
            columns = by_column.ptr.data_ptr(), entry_E.data_ptr()
            expand(made(0, 0), A.shape[1], *columns, place_E.data_ptr(), *products)
            nnz = int(ptr_M[-1])
            col_E = torch.empty(nnz, dtype=torch.int32)
            val_E = torch.empty(nnz, dtype=A.val.dtype)
            gather(made(col_E.data_ptr(), val_E.data_ptr()), place_E.data_ptr(), *products)
            size = col_P.nbytes + val_P.nbytes
            return Csr((A.shape[0], B.shape[1]), ptr_M, col_E, val_E, Counters(total, size))

        return run
