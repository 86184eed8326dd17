"""Gradients of sparse products: two more of them, each only where its factor has entries.

With dC in the places of C: dA = (dC B^T) in the places of A, dB = (A^T dC) in those of B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.claims.lab.spgemm.product import multiply
from shoal.kernel.spgemm.csr import Csr, transposed

if TYPE_CHECKING:
    from shoal.kernel.protocols import Kernel


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        a_E: Tensor,
        b_E: Tensor,
        A: Csr,
        B: Csr,
        mask: Csr | None,
        alpha: float | None,
        kernel: str | Kernel | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        A, B = A.with_values(a_E.detach()), B.with_values(b_E.detach())
        C = multiply(A, B, mask=mask, alpha=alpha, kernel=kernel)
        ctx.factors, ctx.alpha = (A, B, C.with_values(C.val)), alpha
        ctx.mark_non_differentiable(C.ptr, C.col)
        return C.ptr, C.col, C.val

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        A, B, C = ctx.factors
        dC = C.with_values(grads[2].contiguous())
        da = db = None
        if ctx.needs_input_grad[0]:
            da = multiply(dC, transposed(B)[0], mask=A, alpha=ctx.alpha, keep=True).val
        if ctx.needs_input_grad[1]:
            db = multiply(transposed(A)[0], dC, mask=B, alpha=ctx.alpha, keep=True).val
        return da, db, None, None, None, None, None


def product(
    A: Csr, B: Csr, mask: Csr | None, alpha: float | None, kernel: str | Kernel | None
) -> Csr:
    """``alpha A B``, whose values know how they depend on those of A and B."""
    dtype = torch.promote_types(A.val.dtype, B.val.dtype)
    a_E, b_E = A.val.to(dtype), B.val.to(dtype)
    ptr_M, col_E, val_E = _Product.apply(a_E, b_E, A, B, mask, alpha, kernel)  # type: ignore[no-untyped-call]
    return Csr((A.shape[0], B.shape[1]), ptr_M, col_E, val_E)
