"""One batched product over all experts, each with equally many rows; what is more, one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import KernelError, require
from shoal.core.parts import part
from shoal.ir import Estimate, Machine
from shoal.kernel.grouped.base import GroupedKernel
from shoal.kernel.grouped.call import GroupedLinear

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@part
class PaddedGroupedLinear(GroupedKernel):
    """``torch.bmm`` with padding: for many experts with few rows.

    oneDNN takes about 15 us per small bf16 product, whatever its size; one batched product has this
    overhead once. The rows of popular experts above ``level`` are multiplied separately, so that
    they do not increase the padding of all others. Nothing is copied if all experts have equally
    many rows.

    Args:
        level: rows of every expert in the batched product; 0 for the largest number of rows of an
            expert.
    """

    backend: ClassVar[str] = "padded"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    call_s: ClassVar[float] = 3e-5

    level: int = 0

    def __post_init__(self) -> None:
        require(
            self.level >= 0,
            "kernel.grouped_linear.padded.level",
            self.level,
            expected="rows, or 0 for the largest number of rows of an expert",
            error=KernelError,
        )

    def product(self, rows_MK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        at = _Rows.of(counts, self.level, rows_MK.device)
        rows_ElK, turned_EKN = at.level(rows_MK), weight_ENK.transpose(1, 2)
        made = torch.bmm(rows_ElK, turned_EKN).view(-1, weight_ENK.shape[1])
        if at.put is None:
            return made
        if at.taken is None:
            return made.index_select(0, at.put)
        out = made.new_empty(len(rows_MK), made.shape[1])
        out.index_copy_(0, at.taken, made.index_select(0, at.put))
        for expert, mine in at.over:
            torch.mm(rows_MK[mine], turned_EKN[expert], out=out[mine])
        return out

    def gradient(self, grad_MN: Tensor, rows_MK: Tensor, counts: Sequence[int]) -> Tensor:
        import torch

        at = _Rows.of(counts, self.level, rows_MK.device)
        total = torch.bmm(at.level(grad_MN).transpose(1, 2), at.level(rows_MK))
        for expert, mine in at.over:
            total[expert].addmm_(grad_MN[mine].T, rows_MK[mine])
        return total

    def estimate(self, call: GroupedLinear, machine: Machine) -> Estimate:
        """Rows that are added cost as much as the others."""
        whole = GroupedLinear(
            call.padded, call.experts, call.n, call.k, dtype=call.dtype, device=call.device
        )
        return super().estimate(whole, machine).model_copy(update={"flops": call.flops})


class _Rows(NamedTuple):
    """Where rows are in the batched product.

    Args:
        shape: experts, and rows of each.
        taken: which rows are in it; all, if None.
        put: where those are in it; where they were, if None.
        over: experts that have more, and which rows those are.
    """

    shape: tuple[int, int]
    taken: Tensor | None
    put: Tensor | None
    over: list[tuple[int, slice]]

    @classmethod
    def of(cls, counts: Sequence[int], level: int, device: torch.device) -> _Rows:
        """By the rows of every expert."""
        import torch

        shape, taken, put, over = _places(tuple(counts), level)
        sent = [None if one is None else torch.tensor(one, device=device) for one in (taken, put)]
        return cls(shape, sent[0], sent[1], over)

    def level(self, x_MI: Tensor) -> Tensor:
        """[E, level, I], zero where an expert has fewer."""
        experts, rows = self.shape
        if self.put is not None:
            some = x_MI if self.taken is None else x_MI.index_select(0, self.taken)
            x_MI = x_MI.new_zeros(experts * rows, x_MI.shape[1]).index_copy_(0, self.put, some)
        return x_MI.reshape(experts, rows, x_MI.shape[1])


_Indices: TypeAlias = npt.NDArray[np.int64] | None


@functools.lru_cache(maxsize=64)
def _places(
    counts: tuple[int, ...], level: int
) -> tuple[tuple[int, int], _Indices, _Indices, list[tuple[int, slice]]]:
    """What :class:`_Rows` has, before it is on a device; asked for six times a layer and step.

    In numpy: a tensor that is kept belongs to no step, so a scope that counts a device's memory
    does not know it, and a unit that is computed again would do fewer operators.
    """
    most = max(counts)
    level = min(level or most, most)
    shape = len(counts), level
    if len(counts) * most == sum(counts) and level == most:
        return shape, None, None, []
    count_E = np.array(counts)
    start_E, held_E = count_E.cumsum() - count_E, count_E.clip(max=level)
    expert_H = np.arange(len(counts)).repeat(held_E)
    within_H = np.arange(len(expert_H)) - (held_E.cumsum() - held_E)[expert_H]
    put_H = expert_H * level + within_H
    if level == most:
        return shape, None, put_H, []
    over = [
        (expert, slice(start + level, start + count))
        for expert, (start, count) in enumerate(zip(start_E.tolist(), counts, strict=True))
        if count > level
    ]
    return shape, start_E[expert_H] + within_H, put_H, over
