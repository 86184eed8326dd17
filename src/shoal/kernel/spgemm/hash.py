"""Row by row, merged in a hash table that stays in the core's own cache.

Source: Kheradmand et al., SMASH: Sparse Matrix Atomic Scratchpad Hashing, 2021; Gustavson, Two
Fast Algorithms for Sparse Matrices: Multiplication and Permuted Transposition, 1978.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.core.errors import KernelError, require
from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.spgemm.base import SparseKernel
from shoal.kernel.spgemm.call import SEMIRINGS, Semiring, SpGemm

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.spgemm.csr import Csr

_VERSION = {"v1": 1, "v2": 2, "v3": 3}


@part
class Hash(SparseKernel):
    """Row-wise products (Gustavson): scaled rows of B are accumulated in a hash table.

    Rows are processed in windows. A row with a narrow span of columns is accumulated in a dense
    range instead, and one too long for the table in ranges of columns. A short row with the pattern
    of the previous row, shifted, as in a stencil, reuses the positions of that row. Sums are in the
    order of A's row, so the bits do not depend on the number of threads, the windows or the other
    rows.

    Args:
        version: v1 assigns equally many rows to each thread; v2 assigns windows of equal work and
            spreads neighbouring columns; v3 also overlaps the copy of a finished window with the
            next one and prefetches rows of B.
        budget_bytes: bytes of a thread's tables; three quarters of its L2 cache if not given.
        dense_ratio: a row is accumulated in a dense range if it spans at most this many columns per
            product; 0 for never.
        exact: count the entries first and allocate exactly these; otherwise reserve memory for the
            upper bound and release the rest.
    """

    version: Literal["v1", "v2", "v3"] = "v3"
    budget_bytes: int | None = None
    dense_ratio: int = 128
    exact: bool = False

    backend: ClassVar[str] = "hash"
    invariant: ClassVar[bool] = True
    compiled: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "int64", "bool")
    semirings: ClassVar[tuple[Semiring, ...]] = SEMIRINGS
    masks: ClassVar[bool] = True
    counted: ClassVar[bool] = True
    multiply_s: ClassVar[float] = 2.5e-9
    call_s: ClassVar[float] = 5e-5

    def __post_init__(self) -> None:
        where = "kernel.spgemm.hash"
        require(
            self.version in _VERSION,
            f"{where}.version",
            self.version,
            expected=f"one of {', '.join(_VERSION)}",
            error=KernelError,
        )
        require(
            self.budget_bytes is None or self.budget_bytes >= 4096,
            f"{where}.budget_bytes",
            self.budget_bytes,
            expected="4096 bytes or more",
            error=KernelError,
        )
        require(
            self.dense_ratio >= 0,
            f"{where}.dense_ratio",
            self.dense_ratio,
            expected="0 or more columns",
            error=KernelError,
        )

    def _refuses(self, call: SpGemm) -> str | None:
        if (call.semiring == "or_and") != (call.dtype == "bool"):
            return "takes bool for or_and, and numbers otherwise"
        return SparseKernel._refuses(self, call)

    def _prepare(self, call: SpGemm, *constants: object) -> Ready:
        import torch

        from shoal.kernel.spgemm import native
        from shoal.kernel.spgemm.csr import Csr, multiplies

        product = native.product(call.semiring, call.dtype)
        options: dict[str, Any] = {
            "version": _VERSION[self.version],
            "sort": call.sort,
            "budget": self.budget_bytes or native.cache_budget(),
            "dense_ratio": self.dense_ratio,
            "keep": call.keep,
        }

        def run(
            A: Csr,
            B: Csr,
            mask: Csr | None = None,
            alpha: Tensor | None = None,
            counted: tuple[Tensor, int] | None = None,
        ) -> Csr:
            each_M, total = counted if counted is not None else multiplies(A, B)
            ptr_M = torch.empty(A.shape[0] + 1, dtype=torch.int64)
            counts = native.no_counts()
            given = functools.partial(
                native.job, A, B, multiplies_M=each_M, ptr_M=ptr_M, mask=mask, **options
            )
            exact, most = self.exact, _most(each_M, B.shape[1], mask, call.keep)
            if not exact:
                try:
                    col = native.Pages(most, torch.int32)
                    val = native.Pages(most, A.val.dtype)
                except OSError:
                    # The system promises no more than there is: count first.
                    exact = True
            if exact:
                count = native.product("pattern", "none")
                unread = native.no_counts()
                _check(count(given(col=0, val=0, counts=unread)), most)
                col = native.Pages(int(ptr_M[-1]), torch.int32)
                val = native.Pages(int(ptr_M[-1]), A.val.dtype)
            made = given(col=col.address, val=val.address, counts=counts, alpha=alpha, exact=exact)
            _check(product(made), most)
            nnz = int(ptr_M[-1])
            return Csr(
                (A.shape[0], B.shape[1]),
                ptr_M,
                col.tensor(nnz),
                val.tensor(nnz),
                native.counters(counts, A, B, nnz, total),
            )

        return run


@part
class HashV1(Hash):
    """Version 1 of ``hash``: equally many rows per thread."""

    version: Literal["v1", "v2", "v3"] = "v1"

    backend: ClassVar[str] = "hash_v1"
    multiply_s: ClassVar[float] = 4e-9


@part
class HashV2(Hash):
    """Version 2 of ``hash``: windows of equal work."""

    version: Literal["v1", "v2", "v3"] = "v2"

    backend: ClassVar[str] = "hash_v2"
    multiply_s: ClassVar[float] = 2.6e-9


def _most(each_M: Tensor, columns: int, mask: Csr | None, keep: bool) -> int:
    """Entries that the result can have."""
    import torch

    bound_M = each_M.clamp(max=columns)
    if mask is not None:
        of_mask_M = mask.ptr.diff()
        bound_M = of_mask_M if keep else torch.minimum(bound_M, of_mask_M)
    return int(bound_M.sum())


def _check(failed: int, most: int) -> None:
    if failed:
        raise KernelError(
            f"kernel.spgemm: not enough memory for a product of up to {most} entries; multiply "
            "fewer rows of A at a time"
        )
