"""Rows that travel to experts in chunks: equal to one process, whatever the numbers of chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.core.meter import Meter
from shoal.ir import Parallel
from shoal.parallel.comm.ranks import ranks_of
from shoal.parallel.expert.chunked import parts, places
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.legal import check_split

MOE: dict[str, Any] = {"family": "mixtral", "num_experts": 4, "top_k": 2, "num_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _agrees(split: dict[str, Any], **extra: Any) -> None:
    result = same_as_one(job(split, global_batch=4, microbatch=1, **extra), config(**MOE), steps=1)
    assert result.same, str(result)


@pytest.mark.parametrize("chunks", [2, [3, 5], [1, 16]], ids=str)
def test_any_chunks_equal_one_process(chunks):
    _agrees({"dp": 2, "ep": 2, "expert_chunks": chunks})


def test_slices_of_experts_are_gathered_chunk_by_chunk():
    _agrees({"dp": 2, "etp": 2, "expert_chunks": [4, 3]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ({"dp": 4, "ep": 2, "etp": 2, "expert_chunks": [3, 2]}, {}),
        ({"dp": 2, "tp": 2, "sp": True, "ep": 4, "expert_chunks": [2, 4]}, {"shard": "zero1"}),
        ({"dp": 2, "ep": 2, "pp": 2, "schedule": "zb_h1", "expert_chunks": [2, 3]}, {}),
        ({"dp": 2, "ep": 2, "expert_chunks": [2, 3]}, {"recompute": "full", "dropout": 0.2}),
    ],
    ids=["both axes", "folded over tp", "weights put off", "recomputed"],
)
def test_chunks_with_what_else_a_job_may_do(split, extra):
    _agrees(split, **extra)


def test_chunks_are_all_rows_once():
    counts = torch.tensor([5, 0, 1, 7])
    for chunks in (1, 2, 3, 9):
        joined = torch.cat([places(counts, i, chunks) for i in range(chunks)])
        assert sorted(joined.tolist()) == list(range(13))
        sizes = [parts(counts, i, chunks) for i in range(chunks)]
        assert torch.equal(sum(sizes), counts)
        apart = torch.stack(sizes).amax(0) - torch.stack(sizes).amin(0)
        assert int(apart.max()) <= 1


def _sent(chunks: tuple[int, int]) -> tuple[torch.Tensor, dict[str, float]]:
    """Outputs and gradients of one layer on four ranks, and the bytes of its rows."""
    model, split = config(**MOE), Parallel(dp=4, ep=2, etp=2)
    source = torch.Generator().manual_seed(0)
    x_RND = torch.randn(4, 11, model.hidden, generator=source, dtype=torch.float64)
    meter = Meter()

    def on(comm: Any) -> torch.Tensor:
        ranks = ranks_of(comm, split).experts
        layer = DispatchedExperts(model, ranks, 0).double()
        layer.chunks = chunks
        own = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=own, dtype=torch.float64))
        x_ND = x_RND[comm.rank].requires_grad_(True)
        layer(x_ND).square().sum().backward()
        return torch.cat([x_ND.grad.flatten(), layer.down_proj.grad.flatten()])

    joined = torch.cat(run_ranks(4, on, meter=meter, ranks_per_node=2))
    return joined, {name: size for name, size in meter.totals().items() if "wire_bytes" in name}


def test_chunks_send_the_same_bytes():
    whole, sent = _sent((1, 1))
    cut, chunked = _sent((3, 4))
    torch.testing.assert_close(cut, whole, rtol=1e-11, atol=1e-11)
    assert chunked == sent


def test_what_cannot_be_cut_is_refused():
    shape = config(**MOE).shape()
    with pytest.raises(PlanError, match=r"parallel\.expert_chunks.*1 to 16"):
        check_split(job({"dp": 2, "ep": 2, "expert_chunks": 17}, microbatch=1), shape)
    with pytest.raises(PlanError, match=r"parallel\.expert_chunks.*parallel\.ep"):
        check_split(job({"dp": 2, "expert_chunks": 2}, microbatch=1), shape)
    with pytest.raises(ValueError, match="expert_chunks"):
        job({"dp": 2, "ep": 2, "expert_chunks": 0})
