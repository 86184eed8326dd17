"""SciPy's product of sparse matrices: one thread, and once more for where entries are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.kernel.protocols import Ready
from shoal.kernel.spgemm.base import SparseKernel
from shoal.kernel.spgemm.call import SpGemm

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.spgemm.csr import Csr


@part
class ScipySpGemm(SparseKernel):
    """``scipy.sparse``, for machines without a compiler."""

    backend: ClassVar[str] = "scipy"
    invariant: ClassVar[bool] = True
    multiply_s: ClassVar[float] = 1e-8
    parallel: ClassVar[bool] = False
    call_s: ClassVar[float] = 1e-4

    def _prepare(self, call: SpGemm, *constants: object) -> Ready:
        import torch

        from shoal.kernel.spgemm.csr import Counters, Csr, multiplies

        def run(A: Csr, B: Csr, mask: Csr | None = None, alpha: Tensor | None = None) -> Csr:
            left = A if alpha is None else A.with_values(alpha * A.val)
            # SciPy leaves out what cancels: ones show where entries meet.
            made = _ones(A) @ _ones(B)
            made.sort_indices()
            made.data = _at_places_of(made, left.scipy() @ B.scipy())
            return Csr(
                (A.shape[0], B.shape[1]),
                torch.from_numpy(made.indptr).to(torch.int64),
                torch.from_numpy(made.indices).to(torch.int32),
                torch.from_numpy(made.data),
                Counters(multiplies(A, B)[1], 12 * B.shape[1]),
            )

        return run


def _ones(A: Csr) -> Any:
    import torch

    return A.with_values(torch.ones(A.nnz)).scipy()


def _at_places_of(pattern: Any, found: Any) -> np.ndarray:
    """Values of ``found`` at the entries of ``pattern``, zero where it has none."""
    found.sort_indices()
    rows = np.arange(pattern.shape[0])
    places, there = (
        np.repeat(rows, np.diff(x.indptr)) * np.int64(pattern.shape[1]) + x.indices
        for x in (pattern, found)
    )
    values = np.zeros(pattern.nnz, dtype=found.dtype)
    values[np.searchsorted(places, there)] = found.data
    return values
