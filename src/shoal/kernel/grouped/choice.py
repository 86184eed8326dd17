"""Which kernel multiplies: a rule on counts and shapes alone, the same on every rank.

Counts differ at every step and layer, so it must cost next to nothing, and results must not
depend on what a probe said: estimates are not asked. On a CPU the work is counted in
multiply-adds, padding among them, and a product of its own counts as so many as it would make in
the time that it takes to begin. Measured with one thread on a CPU with AVX-512 and bf16 (EPYC):

=====  ================  ============================================================
dtype  begins within     because
=====  ================  ============================================================
bf16   15 us             oneDNN looks up how this shape is computed, or writes it anew
fp32   3 us              MKL begins at once
=====  ================  ============================================================

On a GPU one launch beats any loop: the Triton kernel, where there is Triton and the type is one of
its.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from shoal.kernel.calls import Device, Dtype
from shoal.kernel.dispatch import dispatch, kernels_of
from shoal.kernel.grouped.base import GroupedKernel
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.grouped.padded import PaddedGroupedLinear

if TYPE_CHECKING:
    from shoal.kernel.protocols import Kernel

# Multiply-adds that a core makes while one product begins, and while Python asks for it.
_BEGINS = {"fp64": 3e4, "fp32": 1e5, "bf16": 8e5, "fp16": 8e5}
_ASKED = {"fp64": 5e4, "fp32": 1e5, "bf16": 2e5, "fp16": 2e5}
# While rows are put where the padding wants them, and taken from there.
_PADS = {"fp64": 1e6, "fp32": 2e6, "bf16": 3.6e6, "fp16": 3.6e6}
# Rows below which a level saves nothing.
_LEAST = 4


def chosen_kernel(
    counts: Sequence[int], n: int, k: int, dtype: Dtype, device: Device, wanted: str | None = None
) -> GroupedKernel:
    """The kernel for rows of experts.

    Raises:
        KernelError: the wanted backend does not exist or refuses.
    """
    able = _able(len(counts), n, k, dtype, device, wanted)
    if len(able) == 1 or not sum(counts):
        return next(iter(able.values()))
    rows, one = sum(counts), float(n * k)
    busy = len(counts) - counts.count(0)
    begins, request = _BEGINS[dtype], _ASKED[dtype]
    costs = {"loop": busy * (begins + request) + rows * one}
    if "torch" in able:
        costs["torch"] = request + busy * begins + rows * one
    best = min(costs, key=costs.__getitem__)
    level, cost = _level(counts, one, dtype)
    return _padded(level) if cost < costs[best] else able[best]


def _level(counts: Sequence[int], one: float, dtype: Dtype) -> tuple[int, float]:
    """Rows of every expert that are best multiplied at once, 0 for all, and what that costs."""
    begins, request, pads = _BEGINS[dtype], _ASKED[dtype], _PADS[dtype]
    rising = sorted(counts)
    rows, most, whole = sum(rising), rising[-1], len(rising) * rising[-1]
    best = 0, request + begins + whole * one + (pads if whole > rows else 0.0)
    # Where a product begins at once, more of them are no reason to pad.
    level = _LEAST if begins > request else most
    while level < most:
        over = len(rising) - bisect_right(rising, level)
        beyond = sum(rising[-over:]) - over * level
        cost = request + begins + pads + (len(rising) * level + beyond) * one
        # Each reads and writes what the batched one did already.
        cost += over * 2 * (begins + request)
        if cost < best[1]:
            best = level, cost
        level *= 2
    return best


@functools.cache
def _padded(level: int) -> GroupedKernel:
    return PaddedGroupedLinear(level=level)


@functools.lru_cache(maxsize=256)
def _able(
    experts: int, n: int, k: int, dtype: Dtype, device: Device, wanted: str | None
) -> dict[str, GroupedKernel]:
    """Kernels among which counts decide; one where they do not."""
    call = GroupedLinear(experts, experts, n, k, dtype=dtype, device=device)
    if wanted is not None:
        return {wanted: _grouped(dispatch(call, wanted=wanted))}
    kernels = kernels_of(call.op)
    if device == "cuda":
        names = [name for name in ("triton", "loop") if kernels[name].refuses(call) is None][:1]
    else:
        names = [
            name for name in ("loop", "torch", "padded") if kernels[name].refuses(call) is None
        ]
    return {name: _grouped(kernels[name]) for name in names}


def _grouped(kernel: Kernel) -> GroupedKernel:
    return cast("GroupedKernel", kernel)
