"""What is asked of ``grouped_linear``: shapes and types, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shoal.kernel.calls import BYTES, Device, Dtype


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """``y[m, N] = weight[e, N, K] @ x[m, K]`` for every row m, where e is the expert it lies by.

    No constants: ``ready(x[M, K], weight[E, N, K], counts) -> y[M, N]``, differentiable once; the
    first ``counts[0]`` rows are those of expert 0, and so on. M and counts may differ between
    calls; here they determine the cost of a call.

    Args:
        experts: matrices, E.
        busy: experts that have rows; all there can be, if 0.
        most: rows of the expert that has most; as many as of any other, if 0.
        dtype: of x, weight and y.
    """

    op: ClassVar[str] = "grouped_linear"
    m: int
    experts: int
    n: int
    k: int
    busy: int = 0
    most: int = 0
    dtype: Dtype = "bf16"
    device: Device = "cpu"

    @property
    def launches(self) -> int:
        """Products of one matrix that the call is made of."""
        return self.busy or min(self.experts, self.m)

    @property
    def padded(self) -> int:
        """Rows, if every expert had as many as that which has most."""
        return self.experts * (self.most or -(-self.m // self.experts))

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        """Matrices of experts that have rows, and the rows, once."""
        rows = self.m * (self.n + self.k)
        return BYTES[self.dtype] * float(self.launches * self.n * self.k + rows)
