"""What the kernels of ``grouped_linear`` have in common: two passes, and what they cost.

Shapes: M rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from shoal.ir import Estimate, Machine
from shoal.kernel.base import BaseKernel
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


class GroupedKernel(BaseKernel):
    """Base of the kernels ``grouped_linear.*``: a product, and the gradient of its matrices.

    The gradient of rows is a product too, with the matrices transposed.

    Attributes:
        launch_s: of each product of one matrix that a call is made of.
    """

    op: ClassVar[str] = "grouped_linear"
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    launch_s: ClassVar[float] = 0.0

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        """[M, N], each expert's matrix with its own rows.

        Args:
            rows_MK: by expert.
            weight_ENK: of the same dtype, any strides.
            counts: rows of every expert; their sum is M.
        """
        raise TypeError(f"{type(self).__name__} cannot multiply")

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        """[E, N, K], the sum of each expert's outer products; zero where it has no rows.

        Args:
            grad_MN: of the product, contiguous.
            rows_MK: that were multiplied.
            counts: rows of every expert.
        """
        raise TypeError(f"{type(self).__name__} has no gradient")

    def estimate(self, call: GroupedLinear, machine: Machine) -> Estimate:
        """Time of one call, and a little for each product that it is made of."""
        estimate = super().estimate(call, machine)
        begun_s = self.launch_s * call.launches
        return estimate.model_copy(update={"step_s": estimate.step_s.shifted(begun_s)})

    def _prepare(self, call: GroupedLinear) -> Ready:
        from shoal.kernel.grouped.product import multiply

        return functools.partial(multiply, kernel=self)
