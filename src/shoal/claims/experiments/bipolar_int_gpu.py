"""The GPU's part of the claim bipolar_int: Triton's product of planes against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.claims.experiments.bipolar_int_layers import packed
from shoal.claims.protocols import PairedSamples
from shoal.core.measure import interleave
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.dispatch import kernels_of

__all__ = ["timed"]

_TIMES = 10


def _planes(m: int, size: int, w: int, a: int) -> Callable[[], Any]:
    call = MatmulPlanesCall(m=m, n=size, k=size, w=w, a=a, device="cuda")
    planes_w, planes_x = packed(size, size, w, 0).cuda(), packed(m, size, a, 1).cuda()
    ready = kernels_of(call.op)["triton"].prepare(call, planes_w)
    return lambda: ready(planes_x)


def timed(m: int, size: int, pairs: int, as_baseline: bool) -> tuple[PairedSamples, PairedSamples]:
    """W2A2 against bf16, W1A2 against int8: seconds of ten products each.

    Args:
        m: rows.
        size: outputs and inputs.
        pairs: rounds.
        as_baseline: torch's products in the place of ours.
    """
    x, w = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for rows in (m, size))
    x8, w8 = (
        torch.randint(-127, 128, (rows, size), device="cuda", dtype=torch.int8)
        for rows in (m, size)
    )
    calls: dict[str, Callable[[], Any]] = {
        "bf16": lambda: x @ w.T,
        "int8": lambda: torch._int_mm(x8, w8.T),
    }
    calls |= {
        "w2a2": calls["bf16"] if as_baseline else _planes(m, size, 2, 2),
        "w1a2": calls["int8"] if as_baseline else _planes(m, size, 1, 2),
    }

    def waited(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(_TIMES):
                call()
            torch.cuda.synchronize()

        return run

    seconds = interleave({name: waited(call) for name, call in calls.items()}, pairs).seconds
    return (
        PairedSamples(method=seconds["w2a2"], baseline=seconds["bf16"]),
        PairedSamples(method=seconds["w1a2"], baseline=seconds["int8"]),
    )
