"""What the ranks of claim [6] T3 do: products whose communication is hidden, or not.

Both ways send the same bytes in the same messages' order over the same sockets; only the time at
which they are sent differs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.claims.ranks import in_turn
from shoal.parallel.overlap.tile import gathered_product, scattered_product
from shoal.parallel.protocols import Comm
from shoal.parallel.tensor.operators import TAG


def _operands(comm: Comm, rows: int, inner: int, outer: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(comm.rank)
    return (torch.randn(rows, inner, generator=source), torch.randn(inner, outer, generator=source))


def product_s(comm: Comm, rows: int, inner: int, outer: int, repeats: int) -> list[float]:
    """Seconds of the product [rows, inner] x [inner, outer], all ranks at once, no messages."""
    x, weight = _operands(comm, rows, inner, outer)
    results = []
    for _ in range(repeats + 2):
        comm.barrier()
        begin = time.perf_counter()
        x @ weight
        results.append(time.perf_counter() - begin)
    return results[2:]


def scatter_after(x: Tensor, weight: Tensor, comm: Comm) -> Tensor:
    """The product, and then its rows exchanged between two ranks and summed."""
    whole = x @ weight
    rows = len(whole) // 2
    own = whole[comm.rank * rows : (comm.rank + 1) * rows]
    arrived = torch.empty_like(own)
    other = 1 - comm.rank
    pending = comm.receive(arrived, other, tag=TAG)
    sent = comm.send(whole[other * rows : (other + 1) * rows], other, tag=TAG)
    pending.wait()
    sent.wait()
    return own + arrived


def gather_after(x_nI: Tensor, weight: Tensor, comm: Comm) -> Tensor:
    """Rows of two ranks gathered, and then their product."""
    rows = len(x_nI)
    whole = x_nI.new_empty(2 * rows, x_nI.shape[1])
    whole[comm.rank * rows : (comm.rank + 1) * rows] = x_nI
    other = 1 - comm.rank
    pending = comm.receive(whole[other * rows : (other + 1) * rows], other, tag=TAG)
    sent = comm.send(x_nI, other, tag=TAG)
    pending.wait()
    sent.wait()
    return whole @ weight


def _library(x: Tensor, weight: Tensor, comm: Comm) -> Tensor:
    """The product, and then the library's own reduce-scatter."""
    whole = x @ weight
    out = whole.new_empty(len(whole) // comm.world, whole.shape[1])
    comm.reduce_scatter(out, whole, tag=TAG).wait()
    return out


def pairs(
    comm: Comm, rows: int, inner: int, outer: int, repeats: int, tiled: bool
) -> dict[str, Any]:
    """Form -> seconds of each turn, one after the other and tiled; largest difference of results.

    ``tiled`` False puts the sequential form in the place of the tiled one.
    """
    x, weight = _operands(comm, rows, inner, outer)
    part = x[: rows // comm.world].contiguous()

    def scatter() -> Tensor:
        if not tiled:
            return scatter_after(x, weight, comm)
        out, pending = scattered_product(x, weight, comm)
        pending.wait()
        return out

    def gather() -> Tensor:
        if not tiled:
            return gather_after(part, weight, comm)
        return gathered_product(part, weight, comm, rows)[1]

    forms: dict[str, Callable[[], Tensor]] = {
        "scatter_after": lambda: scatter_after(x, weight, comm),
        "scatter": scatter,
        "gather_after": lambda: gather_after(part, weight, comm),
        "gather": gather,
        "library": lambda: _library(x, weight, comm),
    }
    results: dict[str, Tensor] = {}

    def once(form: str) -> None:
        results[form] = forms[form]()

    seconds = in_turn(comm, {form: functools.partial(once, form) for form in forms}, repeats)
    scale = float(results["scatter_after"].abs().max())
    apart = max(
        float((results[form] - results[f"{form}_after"]).abs().max())
        for form in ("scatter", "gather")
    )
    return {**seconds, "difference": apart / scale}
