"""Entry point of ``grouped_linear``: a product with gradients, by the kernel that its counts want.

Shapes: M rows, which lie by expert, E experts, N outputs, K inputs.

Source: Gale et al., MegaBlocks: Efficient Sparse Training with Mixture-of-Experts, 2022, which
names the three products; Liu et al., MoE Parallel Folding, 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.core.errors import KernelError
from shoal.kernel.calls import Device
from shoal.kernel.grouped.choice import chosen_kernel
from shoal.kernel.tensors import compute_dtype, name_of

if TYPE_CHECKING:
    from shoal.kernel.grouped.base import GroupedKernel

Later = Callable[[Tensor, Callable[[], Tensor]], bool]
"""Given a parameter and what computes its gradient: whether it will be computed later."""


def multiply(
    rows_MK: Tensor,
    weight_ENK: Tensor,
    counts: Sequence[int],
    *,
    backend: str | None = None,
    kernel: GroupedKernel | None = None,
    later: Later | None = None,
    again: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Each expert's matrix with its own rows [M, N]; differentiable once.

    Args:
        rows_MK: floating, by expert.
        weight_ENK: of each expert, as ``nn.Linear`` has it; computed in the dtype of the rows, or
            of autocast.
        counts: rows of every expert; an expert may have none.
        backend: the kernel that must be taken; a rule on counts chooses, if not given.
        kernel: the same, at hand.
        later: may put the gradient of the matrices off.
        again: gives the matrices for the backward pass, where they are not to be kept.

    Raises:
        KernelError: shapes or counts do not fit together, or the backend refuses.
    """
    _check(rows_MK, weight_ENK, counts)
    if torch.compiler.is_compiling():
        return _one_by_one(rows_MK, weight_ENK, counts)
    dtype = compute_dtype(rows_MK)
    if kernel is None:
        _, n, k = weight_ENK.shape
        kernel = chosen_kernel(counts, n, k, name_of(dtype), _device(rows_MK), backend)
    if not (torch.is_grad_enabled() and (rows_MK.requires_grad or weight_ENK.requires_grad)):
        return kernel.product(rows_MK.to(dtype), weight_ENK.to(dtype), counts)
    out: Tensor = _Grouped.apply(  # type: ignore[no-untyped-call]
        rows_MK, weight_ENK, counts, kernel, dtype, later, again
    )
    return out


@torch.no_grad()
def weight_gradient(
    grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int], *, backend: str | None = None
) -> Tensor:
    """Gradient [E, N, K] of the matrices, for code that runs its own backward pass."""
    n, k = grad_MN.shape[1], rows_MK.shape[1]
    kernel = chosen_kernel(counts, n, k, name_of(rows_MK.dtype), _device(rows_MK), backend)
    return kernel.gradient(grad_MN.contiguous(), rows_MK, counts)


def _device(x: Tensor) -> Device:
    return "cuda" if x.is_cuda else "cpu"


def _one_by_one(rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
    """The same in operators that a compiler can look into; a kernel and its rule it cannot."""
    if not len(rows_MK):
        return rows_MK.new_empty(0, weight_ENK.shape[1])
    # Unbound in one piece: the gradient of an index is a whole tensor of zeros but for it.
    parts = zip(torch.split(rows_MK, list(counts)), weight_ENK.unbind(0), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts if len(rows)])


class _Grouped(torch.autograd.Function):
    """Forward a product, back a product with the matrices transposed and a sum by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MK: Tensor,
        weight_ENK: Tensor,
        counts: Sequence[int],
        kernel: GroupedKernel,
        dtype: torch.dtype,
        later: Later | None,
        again: Callable[[], Tensor] | None,
    ) -> Tensor:
        x, cast = rows_MK.to(dtype), weight_ENK.to(dtype)
        ctx.save_for_backward(x, *([cast] if again is None else []))
        # What is made for a pass is not kept beside what it is cast to, and waits for its gradient.
        ctx.weight = weight_ENK if weight_ENK.is_leaf else None
        ctx.counts, ctx.kernel, ctx.later, ctx.again = counts, kernel, later, again
        return kernel.product(x, cast, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        counts, kernel = ctx.counts, ctx.kernel
        grad = grad_MN.contiguous()
        out: Tensor | None = None
        if ctx.needs_input_grad[0]:
            cast = kept[0] if kept else ctx.again().to(x.dtype)
            out = kernel.product(grad, cast.transpose(1, 2), counts)

        def of_weight() -> Tensor:
            with torch.no_grad():  # it may be asked for later, outside of this pass
                tensor: Tensor = kernel.gradient(grad, x, counts)
            return tensor

        if not ctx.needs_input_grad[1] or (
            ctx.later is not None and ctx.weight is not None and ctx.later(ctx.weight, of_weight)
        ):
            return out, None, None, None, None, None, None
        return out, of_weight(), None, None, None, None, None


def _check(rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> None:
    if weight_ENK.ndim != 3 or rows_MK.ndim != 2 or rows_MK.shape[1] != weight_ENK.shape[2]:
        raise KernelError(
            f"kernel.grouped_linear: rows {list(rows_MK.shape)} and matrices "
            f"{list(weight_ENK.shape)}; expected [M, K] and [E, N, K]"
        )
    if len(counts) != len(weight_ENK):
        raise KernelError(
            f"kernel.grouped_linear counts: {len(counts)} counts for {len(weight_ENK)} experts; "
            "give one per expert, 0 if it has no rows"
        )
    if sum(counts) != len(rows_MK) or any(count < 0 for count in counts):
        raise KernelError(
            f"kernel.grouped_linear counts = {list(counts)}: their sum is {sum(counts)}, but "
            f"there are {len(rows_MK)} rows; give the number of rows of each expert, at least 0"
        )
