"""What the ranks of claim [35] FSMoE do: tasks of a layer at many sizes, the layer in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.claims.experiments.tiny import mixture
from shoal.claims.ranks import in_turn
from shoal.ir import Parallel
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.expert.exchange import exchanged, spread

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

RANKS, _EP, _ETP = 4, 2, 2
SIZES = (1 / 32, 1 / 16, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 1.0)
"""Parts of the whole work at which tasks are timed."""


def _layer(comm: Comm, hidden: int, width: int) -> DispatchedExperts:
    ranks = ranks_of(comm, Parallel(dp=RANKS, ep=_EP, etp=_ETP)).experts
    assert ranks is not None
    layer = DispatchedExperts(mixture(hidden, 1, 4, width), ranks, 0)
    source = torch.Generator().manual_seed(comm.rank)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.02, generator=source)
        # Of every rank the same, or the same tokens would go elsewhere.
        layer.router.weight.normal_(generator=torch.Generator().manual_seed(7))
    return layer


def _timed(comm: Comm, work: Callable[[], object], repeats: int) -> float:
    """Least seconds of ``work``, all ranks at once."""
    results = []
    for _ in range(repeats + 1):
        comm.barrier()
        begin = time.perf_counter()
        work()
        results.append(time.perf_counter() - begin)
    return min(results[1:])


def tasks_s(
    comm: Comm, hidden: int, width: int, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of exchange, gather and experts, forward, at each of :data:`SIZES`."""
    layer = _layer(comm, hidden, width)
    ep, etp = layer.ranks.ep, layer.ranks.etp
    seconds: dict[str, list[float]] = {"exchange": [], "gather": [], "experts": []}
    with torch.no_grad():
        for part in SIZES:
            rows = max(2, int(2 * tokens * part)) // 2 * 2
            x_MD = torch.randn(rows, hidden)
            half = [rows // 2] * 2
            many = torch.randn(rows * etp.world, hidden)
            counts = [len(many) // 2] * 2

            def exchange(x: Tensor = x_MD, sent: list[int] = half) -> Tensor:
                return exchanged(x, sent, sent, ep)

            def gather(x: Tensor = x_MD) -> Tensor:
                return spread(x, [len(x)] * etp.world, etp)

            def experts(x: Tensor = many, rows: list[int] = counts) -> Tensor:
                return layer._made(x, rows)

            for name, work in (("exchange", exchange), ("gather", gather), ("experts", experts)):
                seconds[name].append(_timed(comm, work, repeats))
    return seconds


def layer_s(
    comm: Comm, hidden: int, width: int, tokens: int, repeats: int, chunks: list[int]
) -> dict[str, Any]:
    """Seconds of a layer forward and back, uncut and in chunks in turn, and how far they differ."""
    layer = _layer(comm, hidden, width)
    source = torch.Generator().manual_seed(100 + comm.rank)
    whole_ND = torch.randn(tokens, hidden, generator=source)
    forms = {"uncut": (1, 1), "cut": (chunks[0], chunks[1])}
    seen: dict[str, Tensor] = {}

    def ready(form: str) -> None:
        layer.chunks = forms[form]
        layer.zero_grad(set_to_none=True)
        seen[form] = whole_ND.detach().requires_grad_(True)

    arms = {form: lambda form=form: layer(seen[form]).square().sum().backward() for form in forms}
    seconds = in_turn(comm, arms, repeats, ready=ready)
    uncut, cut = seen["uncut"].grad, seen["cut"].grad
    assert uncut is not None and cut is not None
    return {**seconds, "difference": float((uncut - cut).abs().max() / uncut.abs().max())}
