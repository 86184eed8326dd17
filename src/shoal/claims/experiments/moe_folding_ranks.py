"""What the claim of MoE Parallel Folding runs: routing on eight ranks, steps, one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.claims.experiments.tiny import apart, mixture

if TYPE_CHECKING:
    from shoal.claims.lab.thread_ranks import ThreadComm

__all__ = ["SPLITS", "SentBytes", "errors", "layer_and_permuting", "routed_bytes"]

# Grids of two, four and eight ranks: experts over each axis, over several, and cut.
SPLITS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    {"dp": 2, "tp": 2, "sp": True, "ep": 2, "etp": 2},
    {"dp": 2, "pp": 2, "ep": 2},
    {"dp": 2, "cp": 2, "ep": 4},
    {"dp": 2, "tp": 2, "cp": 2, "sp": True, "ep": 4},
    {"dp": 4, "tp": 2, "sp": True, "ep": 4, "fold": False},
)
_RANKS, _PER_NODE, _TOKENS = 8, 4, 96


class SentBytes(NamedTuple):
    """What eight ranks on two nodes sent to their experts and back.

    Args:
        near: bytes inside the nodes.
        far: bytes between them.
        uncounted: bytes beside those that the plan counts of this routing.
        rows: that each expert got.
    """

    near: float
    far: float
    uncounted: float
    rows: tuple[int, ...]


def routed_bytes(seed: int, *, fold: bool) -> SentBytes:
    """Route tokens on eight ranks, some experts far more popular than others, and count."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.core.meter import Meter
    from shoal.cost.price.expert_hops import routed
    from shoal.ir import Parallel
    from shoal.parallel.comm.ranks import ranks_of
    from shoal.parallel.expert.dispatch import DispatchedExperts
    from shoal.parallel.expert.exchange import TAG

    config = mixture(32, 2, 8, 16)
    split = Parallel(dp=4, tp=2, sp=True, ep=4, fold=fold)
    source = torch.Generator().manual_seed(seed)
    # Of states that lean one way, a router chooses some experts far more often than others.
    x_RND = torch.randn(_RANKS, _TOKENS, config.hidden, generator=source) + 0.5
    router = torch.randn(config.num_experts, config.hidden, generator=source)
    meter = Meter()

    def on(comm: ThreadComm) -> list[int]:
        ranks = ranks_of(comm, split).experts
        assert ranks is not None
        layer = DispatchedExperts(config, ranks, 0)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
            layer.router.weight.copy_(router)
            layer(x_RND[comm.rank])
            chosen = layer.routed(x_RND[comm.rank], None)[0].experts
        counts: list[int] = torch.bincount(chosen.flatten(), minlength=8).tolist()
        return counts

    counts = run_ranks(_RANKS, on, meter=meter, ranks_per_node=_PER_NODE)
    width = x_RND.element_size() * config.hidden
    planned = [2 * size for size in routed(split.experts().groups("ep"), counts, width, _PER_NODE)]
    totals = meter.totals()
    metered = [
        totals.get(f"wire_bytes{{op=all_to_all,scope={scope},tag={TAG}}}", 0.0)
        for scope in ("loopback", "node")
    ]
    uncounted = sum(abs(one - other) for one, other in zip(metered, planned, strict=True))
    rows = tuple(map(sum, zip(*counts, strict=True)))
    return SentBytes(metered[0], metered[1], uncounted, rows)


def errors(splits: tuple[dict[str, Any], ...]) -> tuple[float, ...]:
    """Largest relative difference to one process after a step on each grid, in float64."""
    return tuple(apart(split, mixture(32, 2, 4, 16)) for split in splits)


def layer_and_permuting(
    experts: int, width: int, tokens: int, seed: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer of experts of this width, forward and back, and its permuting."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.model.permutation import RoutingPermutation
    from shoal.parallel.expert.dispatch import DispatchedExperts
    from shoal.parallel.protocols import ExpertRanks

    torch.manual_seed(seed)
    one = run_ranks(1, lambda comm: comm)[0]
    layer = DispatchedExperts(mixture(width, 2, experts, width), ExpertRanks(one, one, one, one), 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    x_ND = torch.randn(tokens, width, requires_grad=True)
    routed, _ = layer.routed(x_ND, None)
    weight_NK, expert_NK = routed.weights.detach().requires_grad_(True), routed.experts

    def whole() -> None:
        torch.autograd.backward(layer(x_ND).sum())

    def permuting() -> None:
        at = RoutingPermutation(expert_NK, experts)
        torch.autograd.backward(at.unpermute(at.permute(x_ND), weight_NK).sum())

    return whole, permuting
