"""What is asked of ``spgemm``, in sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from shoal.kernel.calls import Device

Semiring = Literal["plus_times", "min_plus", "or_and"]
SparseDtype = Literal["fp64", "fp32", "bf16", "fp16", "int64", "bool"]

SEMIRINGS: tuple[Semiring, ...] = get_args(Semiring)
VALUE_BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int64": 8,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class SpGemm:
    """``C[M, N] = alpha A[M, K] B[K, N]``, where C has an entry for every matching pair of entries.

    No constants: ``ready(A, B, mask=None, alpha=None) -> C``, all :class:`~.csr.Csr`. All numbers
    may differ between calls; they determine the cost of a call.

    Args:
        m: rows of A.
        k: columns of A, rows of B.
        n: columns of B.
        nnz_a: entries of A.
        nnz_b: entries of B.
        multiplies: products of an entry of A and an entry of B.
        nnz_c: entries of C where known; 0 otherwise.
        semiring: what times and plus mean.
        sort: the columns of a row of C must be in order.
        masked: only entries that a mask has are wanted.
        keep: every entry of the mask is written, also without products.
    """

    op: ClassVar[str] = "spgemm"
    m: int
    k: int
    n: int
    nnz_a: int
    nnz_b: int
    multiplies: int
    nnz_c: int = 0
    semiring: Semiring = "plus_times"
    sort: bool = True
    masked: bool = False
    keep: bool = False
    dtype: SparseDtype = "fp64"
    device: Device = "cpu"

    @property
    def flops(self) -> float:
        """A multiply and an add each."""
        return 2.0 * self.multiplies

    @property
    def moved_bytes(self) -> float:
        """Entries of A, B and C once, with 4 bytes for a column and 8 for the end of a row."""
        entry = 4 + VALUE_BYTES[self.dtype]
        return entry * float(self.nnz_a + self.nnz_b + self.nnz_c) + 8.0 * (2 * self.m + self.k)
