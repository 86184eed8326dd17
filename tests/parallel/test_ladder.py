"""Ladder residual and desync under tensor parallelism: equal to one process, by their sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.ir import Parallel
from shoal.model.attention import attend
from shoal.model.ladder import settled
from shoal.model.rope import tables
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.block import SplitBlock
from shoal.parallel.tensor.slices import slices, take


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "parallel", "more"),
    [
        ("all", {"tp": 2}, {}),
        pytest.param("upper_half", {"tp": 2}, {"recompute": "full"}, marks=pytest.mark.slow),
        ((0, 3, 4), {"tp": 2}, {"dropout": 0.2}),
        pytest.param("all", {"dp": 2, "tp": 2}, {"shard": "zero2"}, marks=pytest.mark.slow),
    ],
)
def test_every_split_equals_one_process(
    layers: Any, parallel: dict[str, Any], more: dict[str, Any]
) -> None:
    model = config(architecture={"residual": {"name": "ladder", "layers": layers}})
    result = same_as_one(job(parallel, **more), model)
    assert result.same, result


@pytest.mark.parametrize(
    ("every", "parallel", "more"),
    [
        (4, {"tp": 2}, {}),
        pytest.param(3, {"dp": 2, "tp": 2}, {"shard": "zero2"}, marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param(3, {"dp": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_apart_equal_one_process(
    every: int, parallel: dict[str, Any], more: dict[str, Any]
) -> None:
    model = config(architecture={"residual": {"name": "desync", "every": every}})
    result = same_as_one(job(parallel, **more), model)
    assert result.same, result


class _Log:
    """A communicator that notes when a sum begins and when it is waited for."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.seen = comm, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        number = self.seen.count("begin")
        self.seen.append("begin")
        pending = self._comm.all_reduce(x, **options)

        def wait() -> None:
            self.seen.append(f"wait {number}")
            pending.wait()

        return type("Pending", (), {"wait": staticmethod(wait)})()


def _forward(comm: Any, residual: Any, *, backward: bool = False) -> tuple[list[str], torch.Tensor]:
    """The sums of four blocks on one of two ranks, there or back, and the stream behind them."""
    model = config(num_layers=4, architecture={"residual": residual})
    fresh = SeededWeights(model, dtype=torch.float64)
    log: Any = _Log(comm)
    every = slices(model, Parallel(tp=2), comm.rank)
    x: Any = torch.randn(6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_(backward)
    cos, sin = tables(model, 0, 6, torch.device("cpu"), torch.float64)
    for layer in range(4):
        block = SplitBlock(model, layer, log, sp=False).double()
        for part, _ in list(block.named_parameters()):
            whole = f"blocks.{layer}.{part}"
            owner, _, leaf = part.rpartition(".")
            value = take(fresh.whole(whole), every[whole])
            setattr(block.get_submodule(owner), leaf, torch.nn.Parameter(value))
        x = block(x, cos, sin, lambda q, k, v: attend(q, k, v, None, causal=True), 1)
    x = settled(x, 4)
    if backward:
        log.seen.clear()
        x.square().sum().backward()
    return log.seen, x.detach()


def test_on_the_way_back_each_sum_travels_while_a_sub_layer_computes() -> None:
    standard = run_ranks(2, lambda comm: _forward(comm, "standard", backward=True))[0][0]
    ladder = run_ranks(2, lambda comm: _forward(comm, "ladder", backward=True))[0][0]
    # The gradient of the first sub-layer's input is nobody's here but that of the embedding.
    assert standard == [word for n in range(8) for word in ("begin", f"wait {n}")]
    assert ladder.count("begin") == 8
    late = ["begin", "begin", *(w for n in range(6) for w in (f"wait {n}", "begin"))]
    assert ladder == [*late, "wait 6", "wait 7"]


def test_as_many_sums_as_standard_and_each_waited_for_one_sub_layer_later() -> None:
    standard = run_ranks(2, lambda comm: _forward(comm, "standard"))[0][0]
    (ladder, x), (_, other) = run_ranks(2, lambda comm: _forward(comm, "ladder"))
    assert torch.equal(x, other)
    assert ladder.count("begin") == standard.count("begin") == 8
    assert standard == [word for n in range(8) for word in ("begin", f"wait {n}")]
    desync = {"name": "desync", "every": 3}
    some, y = run_ranks(2, lambda comm: _forward(comm, desync))[0]
    assert some == [word for n in range(3) for word in ("begin", f"wait {n}")]
    assert not torch.allclose(x, y)
    # The sum of sub-layer i is waited for when i + 1 has begun its own, never before.
    late = ["begin", "begin", *(w for n in range(6) for w in (f"wait {n}", "begin"))]
    assert ladder == [*late, "wait 6", "wait 7"]


@pytest.mark.parametrize(
    ("parallel", "more", "named"),
    [
        ({"pp": 2}, {}, r"parallel\.pp"),
        ({"tp": 2, "sp": True}, {}, r"parallel\.sp"),
        ({"cp": 2}, {}, r"parallel\.cp"),
        ({"dp": 2}, {"shard": "zero3"}, "shard"),
        ({}, {"compile": True}, "compile"),
        ({}, {"offload": "zero_infinity"}, "offload"),
    ],
)
def test_what_cannot_run_it_refuses_it(
    parallel: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    shape = config(architecture={"residual": "ladder"}).shape()
    with pytest.raises(PlanError, match=named):
        check_split(job(parallel, **more), shape)


def test_other_ranks_than_the_model_has_are_refused() -> None:
    made = {"name": "desync", "ranks": 4}
    shape = config(num_heads=4, num_kv_heads=4, architecture={"residual": made}).shape()
    with pytest.raises(PlanError, match=r"parallel\.tp = 2.*1 or 4"):
        check_split(job({"tp": 2}), shape)
    with pytest.raises(PlanError, match="dropout"):
        check_split(job({"tp": 4}, dropout=0.1), shape)
