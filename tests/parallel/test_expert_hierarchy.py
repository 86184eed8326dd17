"""Rows that travel to experts node by node: equal to one process, and the bytes are predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.core.meter import Meter
from shoal.cost.price.expert_hops import by_node, exchange, hops, routed
from shoal.ir import Parallel
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.expert.exchange import TAG
from shoal.parallel.expert.hierarchy import Hops
from shoal.parallel.legal import check_split

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _agrees(split: dict[str, Any], per_node: int = 2, **extra: Any) -> None:
    model = {**MOE, **extra.pop("model", {})}
    whole = job(split, global_batch=extra.pop("batch", 4), microbatch=1, **extra)

    def run(on: Any) -> Any:
        return run_ranks(whole.parallel.world, on, ranks_per_node=per_node)[0]

    result = same_as_one(whole, config(**model), steps=1, run=run)
    assert result.same, str(result)


@pytest.mark.parametrize("chunks", [1, [3, 2]], ids=str)
@pytest.mark.parametrize("dispatch", ["1dh", "2dh"])
def test_any_way_in_any_chunks_equals_one_process(dispatch, chunks):
    _agrees({"dp": 4, "ep": 4, "expert_dispatch": dispatch, "expert_chunks": chunks})


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["1dh", "2dh"])
@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ({"dp": 8, "ep": 4, "etp": 2, "expert_chunks": [4, 3]}, {"per_node": 4, "batch": 8}),
        ({"dp": 8, "ep": 8}, {"per_node": 4, "batch": 8, "model": {"num_experts": 8}}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 4, "expert_chunks": [2, 5]}, {"shard": "zero1"}),
        ({"dp": 4, "ep": 4, "placer": {"name": "fssdp", "slots": 2}}, {}),
        ({"dp": 4, "ep": 2, "expert_chunks": [2, 1]}, {}),
        ({"dp": 4, "ep": 4}, {"recompute": "full", "per_node": 1}),
    ],
    ids=["slices", "four a node", "over tp", "copies", "one node each", "one rank a node"],
)
def test_ways_with_what_else_a_job_may_do(split, extra, dispatch):
    _agrees({**split, "expert_dispatch": dispatch}, **extra)


def _rows(world: int) -> np.ndarray:
    """Rows from each rank to each, some none."""
    rows_RR = np.random.default_rng(3).integers(0, 4, (world, world))
    rows_RR[1] = 0
    return rows_RR


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2), (2, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("dispatch", ["1dh", "2dh"])
def test_rows_come_by_source_and_bytes_are_those_of_the_closed_form(dispatch, nodes, local):
    world = nodes * local
    rows_RR, meter = _rows(world), Meter()
    split = Parallel(dp=world, ep=world, expert_dispatch=dispatch)

    def on(comm: Any) -> list[list[float]]:
        result = ranks_of(comm, split).experts
        # Each row says where it is from and where it goes.
        mine = [
            [float(comm.rank), float(t)] for t, n in enumerate(rows_RR[comm.rank]) for _ in range(n)
        ]
        x_MD = torch.tensor(mine, dtype=torch.float64).view(-1, 2)
        return Hops(x_MD, rows_RR, result.nodes, comm.rank).rows().tolist()

    for rank, result in enumerate(run_ranks(world, on, meter=meter, ranks_per_node=local)):
        assert result == [[s, rank] for s in range(world) for _ in range(rows_RR[s, rank])]
    sent = {
        scope: meter.totals().get(f"wire_bytes{{op=all_to_all,scope={scope},tag={TAG}}}", 0.0)
        for scope in ("loopback", "node")
    }
    outcome = routed([tuple(range(world))], rows_RR.tolist(), 16.0, local, dispatch)
    assert (sent["loopback"], sent["node"]) == outcome
    # Between nodes every way sends the same.
    assert outcome[1] == routed([tuple(range(world))], rows_RR.tolist(), 16.0, local)[1]


@pytest.mark.parametrize(("dispatch", "far"), [("flat", 2), ("1dh", 0.5), ("2dh", 1)])
def test_fewer_messages_travel_between_nodes(dispatch, far):
    """Of four ranks on two nodes, per rank and way."""
    messages: list[tuple[int, int]] = []

    def on(comm: Any) -> None:
        wire = type(comm.wire)
        whole = wire.pair

        def pair(self: Any, op: str, nbytes: float, tag: str, peer: int) -> None:
            if tag == TAG and self.to(peer) == "node":
                messages.append((self.rank, peer))
            whole(self, op, nbytes, tag, peer)

        if comm.rank == 0:
            wire.pair = pair
        comm.barrier()
        split = Parallel(dp=4, ep=4, expert_dispatch=dispatch)
        layer = DispatchedExperts(config(**MOE), ranks_of(comm, split).experts, 0)
        for parameter in layer.parameters():
            torch.nn.init.ones_(parameter)
        with torch.no_grad():
            layer(torch.ones(6, 24))
        comm.barrier()
        if comm.rank == 0:
            wire.pair = whole

    run_ranks(4, on, ranks_per_node=2)
    assert len(messages) == 2 * 4 * far


def test_even_routing_is_priced_as_it_is_counted():
    """The busiest rank of even rows, hop by hop, beside all ranks of the same known rows."""
    group, rows = [tuple(range(8))], 16
    even = [[rows // 8] * 8] * 8
    for dispatch in ("flat", "2dh"):
        each = hops(group, 4.0, rows, 4, dispatch)
        near, far = routed(group, even, 4.0, 4, dispatch)
        assert 8 * sum(one.near for one in each) == near
        assert 8 * sum(one.far for one in each) == far
    flat = exchange(group, 4.0, rows, 4)
    first, between, last = hops(group, 4.0, rows, 4, "1dh")
    assert between.far == 4 * flat.far
    assert between.peers == 1
    # A node's first rank gets for others what it gives to them.
    assert first.near - last.near == flat.near


def test_nodes_that_ranks_do_not_fill_evenly_are_refused():
    with pytest.raises(PlanError, match=r"parallel\.expert_dispatch.*2dh.*1, 2, 1 are on"):
        by_node([(1, 2, 3, 4)], 2, "2dh")

    def on(comm: Any) -> None:
        ranks_of(comm, Parallel(dp=4, ep=4, expert_dispatch="1dh"))

    with pytest.raises(PlanError, match=r"expert_dispatch = 1dh.*not known.*use flat"):
        run_ranks(4, on)
    with pytest.raises(PlanError, match="3, 1 are on one node each"):
        run_ranks(4, on, ranks_per_node=3)


def test_a_way_to_experts_takes_experts():
    shape = config(**MOE).shape()
    with pytest.raises(PlanError, match=r"parallel\.expert_dispatch.*parallel\.ep"):
        check_split(job({"dp": 2, "etp": 2, "expert_dispatch": "2dh"}), shape)
    with pytest.raises(PlanError, match=r"parallel\.expert_dispatch"):
        check_split(job({"dp": 2, "expert_dispatch": "1dh"}), config().shape())
    with pytest.raises(ValueError, match="expert_dispatch"):
        job({"dp": 2, "ep": 2, "expert_dispatch": "3dh"})
