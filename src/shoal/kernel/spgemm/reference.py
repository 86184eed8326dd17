"""The meaning of ``spgemm``: every product is written down, and those of one place are added."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.spgemm.base import SparseKernel
from shoal.kernel.spgemm.call import SEMIRINGS, Semiring, SpGemm

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.spgemm.csr import Csr


@part
class ReferenceSpGemm(SparseKernel):
    """Plain torch, with memory for all products; slow."""

    backend: ClassVar[str] = "reference"
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16", "int64", "bool")
    semirings: ClassVar[tuple[Semiring, ...]] = SEMIRINGS
    masks: ClassVar[bool] = True
    multiply_s: ClassVar[float] = 2e-7
    parallel: ClassVar[bool] = False

    def _prepare(self, call: SpGemm, *constants: object) -> Ready:
        import torch

        from shoal.kernel.spgemm.csr import Counters, Csr

        def run(A: Csr, B: Csr, mask: Csr | None = None, alpha: Tensor | None = None) -> Csr:
            N = B.shape[1]
            row_P, col_P, val_P = _products(A, B, call.semiring, alpha)
            # A place of C as one number, in the order of its entries.
            place_P = row_P * N + col_P
            if mask is not None:
                mask_E = _rows(mask) * N + mask.col.long()
                if call.keep:
                    sums = _merged(_distinct(mask_E), place_P, val_P, call.semiring)
                    kept = sums[1][torch.searchsorted(sums[0], mask_E)]
                    return mask.with_values(kept)
                inside = torch.isin(place_P, mask_E)
                place_P, val_P = place_P[inside], val_P[inside]
            place_E, val_E = _merged(_distinct(place_P), place_P, val_P, call.semiring)
            ptr_M = torch.searchsorted(place_E, torch.arange(A.shape[0] + 1) * N)
            size = val_P.element_size()
            return Csr(
                (A.shape[0], N),
                ptr_M,
                (place_E % max(1, N)).to(torch.int32),
                val_E,
                Counters(multiplies=row_P.numel(), table_bytes=row_P.numel() * (16 + size)),
            )

        return run


def _rows(A: Csr) -> Tensor:
    """The row of each entry."""
    import torch

    return torch.repeat_interleave(torch.arange(A.shape[0]), A.ptr.diff())


def _distinct(place_P: Tensor) -> Tensor:
    import torch

    values: Tensor = torch.unique(place_P)
    return values


def _products(
    A: Csr, B: Csr, semiring: Semiring, alpha: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of every product, row by row of A."""
    import torch

    first_E = B.ptr[A.col.long()]
    count_E = B.ptr[A.col.long() + 1] - first_E
    entry_P = torch.repeat_interleave(torch.arange(A.nnz), count_E)
    nth_P = torch.arange(entry_P.numel()) - (count_E.cumsum(0) - count_E)[entry_P]
    other_P = first_E[entry_P] + nth_P
    a, b = A.val[entry_P], B.val[other_P]
    if semiring == "min_plus":
        val = a + b if alpha is None else alpha + a + b
    elif semiring == "or_and":
        val = a & b if alpha is None else alpha & a & b
    else:
        wide = torch.promote_types(a.dtype, torch.float32) if a.is_floating_point() else a.dtype
        a = a.to(wide) if alpha is None else alpha.to(wide) * a.to(wide)
        val = a * b.to(wide)
    return _rows(A)[entry_P], B.col[other_P].long(), val


def _merged(
    place_E: Tensor, place_P: Tensor, val_P: Tensor, semiring: Semiring
) -> tuple[Tensor, Tensor]:
    """The sum, in the sense of the semiring, of all products at each of the places."""
    import torch

    at_P = torch.searchsorted(place_E, place_P)
    inside = torch.isin(place_P, place_E)
    at_P, val_P = at_P[inside], val_P[inside]
    if semiring == "plus_times":
        return place_E, val_P.new_zeros(place_E.numel()).index_add(0, at_P, val_P)
    if semiring == "or_and":
        array = torch.zeros(place_E.numel(), dtype=torch.uint8)
        return place_E, array.scatter_reduce(0, at_P, val_P.to(torch.uint8), "amax").to(torch.bool)
    limits = torch.finfo if val_P.is_floating_point() else torch.iinfo
    none = float("inf") if val_P.is_floating_point() else limits(val_P.dtype).max
    array = torch.full((place_E.numel(),), none, dtype=val_P.dtype)
    return place_E, array.scatter_reduce(0, at_P, val_P, "amin")
