"""``shoal probe gpu``: the kernel table of this card, beside the shipped one that was predicted by.

Prediction: the fastest product of the shipped table, in FLOP/s. ``--only probe --again`` goes
on with the sweep where it stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.frame import Case
from gpu.place import Place
from shoal.cost.gpu.device import gpu_of
from shoal.cost.kernels.own import GRIDS, read_own, sweep_kernels
from shoal.cost.kernels.times import kernel_times
from shoal.machine.protocols import ProbeContext

NEEDS = ("torch",)
BUDGET_S = 180.0
TINY = {"gemm/bf16": [[1, 4, 16], [16, 64], [16, 64]]}


def cases(place: Place) -> Iterator[Case]:
    """One."""
    table = place.out / "kernels.npz"
    yield Case("kernel table", BUDGET_S + 30, functools.partial(_predict, place),
               functools.partial(_sweep, place, table))  # fmt: skip


def _predict(place: Place) -> dict[str, Any]:
    times = kernel_times(gpu_of(place.machine))
    edge = 8192
    rate = 2.0 * edge**3 / times.product("bf16", edge, edge, edge)
    return {"flops": rate, "table": times.source("gemm")}


def _sweep(place: Place, path: Path) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    grids, budget_s = place.pick((GRIDS, BUDGET_S), (TINY, 1e-6))
    with ProbeContext() as context:
        result = sweep_kernels(
            context, budget_s=budget_s, device=place.device, path=path, grids=grids
        )
    table, _ = read_own(path)
    return {
        "flops": table.flops,
        "stream_bytes_per_s": table.stream,
        "done": result.done,
        "total": result.total,
        "grids": {name: list(counts) for name, counts in result.grids.items()},
    }
