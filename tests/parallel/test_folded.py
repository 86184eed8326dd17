"""Experts on a grid of their own: equal to one process, whatever both grids are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, ModelError, PlanError
from shoal.core.meter import Meter
from shoal.ir import Parallel
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.expert.exchange import TAG, combined, exchanged, spread
from shoal.parallel.legal import check_split
from shoal.parallel.shard.folded import FoldedModel

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _grids(world: int) -> list[dict[str, Any]]:
    """Every pair of grids of so many ranks, whose experts have one of their own."""
    grids = []
    sizes = [n for n in (1, 2, 4, 8) if n <= world]
    for dp, tp, cp, pp in itertools.product(sizes, repeat=4):
        if dp * tp * cp * pp != world:
            continue
        for ep, etp in itertools.product(sizes, repeat=2):
            if ep * etp > 1 and (dp * tp * cp) % (ep * etp) == 0 and ep <= 4:
                degrees = {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
                grids.append(degrees | ({"sp": True} if tp > 1 else {}))
    return grids


def _id(split: dict[str, Any]) -> str:
    return "-".join(f"{name}{size}" for name, size in split.items() if size > 1)


def _agrees(split: dict[str, Any], **extra: Any) -> None:
    model = {**MOE, **extra.pop("model", {})}
    result = same_as_one(job(split, global_batch=4, **extra), config(**model), steps=2)
    assert result.same, str(result)


@pytest.mark.parametrize("split", _grids(2), ids=_id)
def test_every_pair_of_grids_of_two_ranks(split):
    _agrees(split, microbatch=1)


@pytest.mark.slow
@pytest.mark.parametrize("split", _grids(4), ids=_id)
def test_every_pair_of_grids_of_four_ranks(split):
    _agrees(split, microbatch=1, shard="zero1")


@pytest.mark.slow
@pytest.mark.parametrize("split", _grids(8)[::7], ids=_id)
def test_grids_of_eight_ranks(split):
    many = {"global_batch": 8 if split["dp"] == 8 else 4, "microbatch": 1}
    layers = {**MOE, "num_layers": max(2, split["pp"])}
    result = same_as_one(job(split, **many), config(**layers), steps=2)
    assert result.same, str(result)


@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ({"dp": 2, "ep": 2}, {"model": {"top_k": 1}}),
        ({"dp": 2, "ep": 2}, {"recompute": "full", "dropout": 0.2}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 2, "fold": False}, {}),
        ({"dp": 2, "ep": 2, "pp": 2, "schedule": "zb_h1"}, {}),
    ],
    ids=["top-1", "recomputed", "inside dp", "zero bubble"],
)
@pytest.mark.slow
def test_what_else_a_job_may_do(split, extra):
    _agrees(split, **extra)


def test_gradients_of_experts_summed_over_all_ranks_are_found(monkeypatch):
    """The oracle sees what an expert-parallel trainer gets wrong most easily."""
    whole = FoldedModel.finish

    def too_often(self: FoldedModel) -> None:
        whole(self)
        for name, parameter in self.model.named_parameters():
            if name.endswith("mlp.down_proj"):
                parameter.grad.mul_(2.0)

    monkeypatch.setattr(FoldedModel, "finish", too_often)
    result = same_as_one(job({"dp": 2, "ep": 2}, global_batch=4), config(**MOE), steps=1)
    assert not result.same
    assert result.worst.endswith("mlp.down_proj")


def _layers(split: dict[str, Any], x_ND: torch.Tensor, only: int | None = None) -> Any:
    """Outputs and bytes of one layer of experts on the ranks of a split, each its own rows."""
    model = config(**MOE)
    parallel = Parallel(**split)
    source = torch.Generator().manual_seed(0)
    router = torch.randn(4, model.hidden, generator=source, dtype=torch.float64)
    gate_up = torch.randn(4, 64, model.hidden, generator=source, dtype=torch.float64)
    down = torch.randn(4, model.hidden, 32, generator=source, dtype=torch.float64)
    if only is not None:
        router.zero_()
        router[only] = 1.0
    meter = Meter()

    def on(comm: Any) -> torch.Tensor:
        ranks = ranks_of(comm, parallel).experts
        layer = DispatchedExperts(model, ranks, 0).double()
        count, width = 4 // ranks.ep.world, 32 // ranks.etp.world
        mine = slice(ranks.ep.rank * count, (ranks.ep.rank + 1) * count)
        cut = slice(ranks.etp.rank * width, (ranks.etp.rank + 1) * width)
        up = slice(32 + cut.start, 32 + cut.stop)
        with torch.no_grad():
            layer.router.weight.copy_(router)
            layer.gate_up_proj.copy_(torch.cat([gate_up[mine, cut], gate_up[mine, up]], 1))
            layer.down_proj.copy_(down[mine, :, cut])
        rows = len(x_ND) // comm.world
        return layer(x_ND[comm.rank * rows : (comm.rank + 1) * rows]).detach()

    return torch.cat(run_ranks(parallel.world, on, meter=meter)), meter


@pytest.mark.parametrize("only", [None, 2])
def test_bytes_are_those_of_the_rows_that_travel(only):
    """A row goes to its expert's rank and back; one that is there already costs nothing."""
    x_ND = torch.randn(24, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x_ND = x_ND.abs()
    alone, _ = _layers({"dp": 2, "etp": 2}, x_ND, only)
    result, meter = _layers({"dp": 4, "ep": 4}, x_ND, only)
    torch.testing.assert_close(result, alone, rtol=1e-12, atol=1e-12)
    source = torch.Generator().manual_seed(0)
    router = torch.randn(4, 24, generator=source, dtype=torch.float64)
    if only is not None:
        router.zero_()
        router[only] = 1.0
    chosen = torch.topk(torch.softmax(x_ND @ router.T, -1), 2).indices
    home = torch.arange(24) // 6
    travel = int((chosen != home[:, None]).sum())
    sent = meter.totals().get(f"wire_bytes{{op=all_to_all,scope=loopback,tag={TAG}}}", 0.0)
    assert sent == 2 * travel * 24 * 8


def test_permuting_there_and_back_is_the_identity():
    def on(comm: Any) -> torch.Tensor:
        rows = [3, 0, 2, 1]
        mine = torch.arange(6.0).view(6, 1) + 10 * comm.rank
        every = [[3, 0, 2, 1]] * 4
        received = [every[source][comm.rank] for source in range(4)]
        there = exchanged(mine, rows, received, comm)
        assert len(there) == 4 * rows[comm.rank]
        return exchanged(there, received, rows, comm) - mine

    assert all(float(one.abs().max()) == 0.0 for one in run_ranks(4, on))


def test_combining_is_the_adjoint_of_spreading():
    def on(comm: Any) -> tuple[float, float]:
        rows = [2, 0, 3]
        source = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(rows[comm.rank], 5, generator=source, dtype=torch.float64)
        y = torch.randn(5, 5, generator=source, dtype=torch.float64)
        return float((spread(x, rows, comm) * y).sum()), float((x * combined(y, rows, comm)).sum())

    ranks = run_ranks(3, on)
    assert sum(a for a, _ in ranks) == pytest.approx(sum(b for _, b in ranks), rel=1e-12)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ({"dp": 4, "ep": 8}, "divisor of dp"),
        ({"dp": 3, "ep": 3}, "divisor of 4 experts"),
        ({"tp": 2, "ep": 2}, r"parallel\.sp"),
        ({"dp": 2, "ep": 2, "order": "dp-pp-cp-tp"}, "pp first"),
        ({"dp": 2, "cp": 2, "ep": 4, "fold": False}, r"parallel\.fold"),
    ],
)
def test_grids_that_cannot_be_are_refused(split, told):
    with pytest.raises((ConfigError, PlanError), match=told):
        check_split(job(split, global_batch=12), config(**MOE).shape())


def test_widths_and_models_that_do_not_go_are_refused():
    with pytest.raises(PlanError, match="width 32"):
        check_split(job({"dp": 3, "etp": 3}, global_batch=12), config(**MOE).shape())
    with pytest.raises(PlanError, match="has no experts"):
        check_split(job({"dp": 2, "ep": 2}), config().shape())
    with pytest.raises(PlanError, match="zero2 or zero3 with ep 2"):
        check_split(job({"dp": 2, "ep": 2}, shard="hybrid"), config(**MOE).shape())


def test_a_router_that_gives_no_numbers_is_named():
    def on(comm: Any) -> None:
        ranks = ranks_of(comm, Parallel(dp=2, ep=2)).experts
        layer = DispatchedExperts(config(**MOE), ranks, 7)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(float("nan"))
        layer(torch.ones(3, 24))

    with pytest.raises(ModelError, match=r"blocks\.7\.mlp\.router"):
        run_ranks(2, on)


def test_groups_are_those_of_a_brute_force():
    parallel = Parallel(dp=4, tp=2, cp=2, pp=2, ep=8, etp=2, sp=True)
    experts = parallel.experts()
    for axes in (("ep",), ("etp",), ("edp", "inner"), ("pp", "ep", "etp")):
        result = {frozenset(group) for group in experts.groups(*axes)}
        brute = {
            frozenset(
                other
                for other in range(parallel.world)
                if all(
                    experts.coord(other)[axis] == place
                    for axis, place in experts.coord(rank).items()
                    if axis not in axes
                )
            )
            for rank in range(parallel.world)
        }
        assert result == brute
    stages = {frozenset(group) for group in parallel.attention().groups("dp", "cp", "tp")}
    assert stages == {frozenset(group) for group in experts.groups("edp", "ep", "etp")}
