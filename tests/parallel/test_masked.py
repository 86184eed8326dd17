"""Ranks that skip stages equal one process whose layers are masked; without skipping, 1F1B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_splits import config as eight_layers
from parallel_splits import job

from shoal.claims.lab.masked import layer_routes, masked_backward, same_as_masked, visiting
from shoal.claims.lab.same_as_one import (
    SeededWeights,
    compare,
    on_rank,
    one_process,
    same_as_one,
    tokens,
)
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import PlanError
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(**changes: Any) -> ModelConfig:
    """A stage or two of layers are enough here."""
    return eight_layers(**{"num_layers": 4, "num_heads": 4, "num_kv_heads": 2, **changes})


def skipping(pp: int, keep: int, changes: dict[str, Any] | None = None, **options: Any) -> TrainJob:
    parallel = {"pp": pp, "schedule": {"name": "skippipe", "keep": keep, "effort": 5, **options}}
    rest = {"microbatch": 1, **(changes or {})}
    parallel |= rest.pop("parallel", {})
    return job(parallel, **rest)


@pytest.mark.parametrize(
    "work",
    [
        skipping(4, 3),
        skipping(4, 3, {"dropout": 0.1}, swap=True),
        skipping(5, 2, of=3),
        skipping(3, 2, {"parallel": {"dp": 2}, "shard": "zero1"}),
        skipping(3, 2, {"parallel": {"tp": 2, "sp": True}}),
        skipping(3, 2, {"parallel": {"cp": 2}, "recompute": "stage"}),
    ],
    ids=["skip", "swap", "replicas", "dp", "tp", "cp"],
)
def test_ranks_equal_the_masked_model(work: TrainJob) -> None:
    result = same_as_masked(work, config(), steps=2, documents=True)
    assert result.same, result


def test_a_tied_embedding_lies_on_the_ranks_of_stage_0() -> None:
    result = same_as_masked(skipping(5, 2, of=3), config(tied=True), steps=2)
    assert result.same, result


@pytest.mark.parametrize("of", [None, 3])
def test_keeping_all_gives_the_gradients_of_1f1b(of: int | None) -> None:
    work = skipping(4, of or 4, of=of)
    result = same_as_one(work, config(), steps=1)
    assert result.same, result
    plain = job({"pp": 4, "schedule": "1f1b"}, microbatch=1)
    weights = SeededWeights(config(), work.seed, torch.float64)
    theirs = run_ranks(4, lambda comm: on_rank(plain, weights, comm, steps=1))[0]
    ours = run_ranks(4, lambda comm: on_rank(work, weights, comm, steps=1))[0]
    assert compare(theirs, ours, torch.float64).same


def test_a_replica_that_nobody_visits_gets_the_sum_too() -> None:
    """More nodes of a stage than micro-batches that come to it."""
    work = skipping(6, 2, {"global_batch": 2}, of=2)
    schedule = check_split(work, config().shape())
    visited = {stage for mb in range(2) for stage in schedule.route(mb)}
    assert len(visited) < schedule.stages
    result = same_as_masked(work, config(), steps=3)
    assert result.same, result


def test_executed_routes_are_the_planned_ones() -> None:
    work = skipping(4, 3, swap=True)
    schedule = check_split(work, config().shape())
    weights = SeededWeights(config(), 0, torch.float64)

    def on(comm: Any) -> list[tuple[int, str]]:
        engine = ParallelEngine(work, schedule, weights, comm, dtype=torch.float64)
        ids = torch.arange(8 * 17).view(8, 17) % 53
        engine.backward(
            ReplicaSequences(ids[:, :-1], ids[:, 1:], None, 0, 0), 1, 128.0, record=True
        )
        assert engine.runtime.events is not None
        assert tuple(event.op for event in engine.runtime.events) == schedule.ops[comm.rank]
        return [(event.op.mb, str(event.op)) for event in engine.runtime.events]

    done = {word for rows in run_ranks(4, on) for _, word in rows}
    assert done == {str(op) for op in schedule.expected()}


def test_evaluation_is_of_the_whole_model() -> None:
    work = skipping(5, 2, of=3)
    weights = SeededWeights(config(), 0, torch.float64)
    ids = torch.arange(4 * 13).view(4, 13) % 53
    wanted = float(weights.model().loss_sum(ids[:, :-1], ids[:, 1:]).detach())

    def on(comm: Any) -> float:
        engine = ParallelEngine(
            work, check_split(work, config().shape()), weights, comm, dtype=torch.float64
        )
        result = engine.loss_sum(ids[:, :-1], ids[:, 1:])
        comm.all_reduce(result, tag="loss").wait()
        return float(result)

    assert run_ranks(5, on) == pytest.approx([wanted] * 5)


def test_a_rank_that_is_a_copy_writes_nothing() -> None:
    work = skipping(5, 2, of=3)
    weights = SeededWeights(config(), 0, torch.float32)

    def on(comm: Any) -> list[str]:
        engine = ParallelEngine(work, check_split(work, config().shape()), weights, comm)
        return [name for name in engine.held() if engine.writes(name)]

    written = [name for names in run_ranks(5, on) for name in names]
    assert sorted(written) == sorted(weights._shapes)


def test_masked_gradients_are_means_over_visiting_tokens() -> None:
    """By hand: each layer's gradient from the sequences that visit it alone."""
    weights = SeededWeights(config(num_layers=3), 0, torch.float64)
    ids = torch.arange(4 * 9).view(4, 9) * 7 % 53
    rows = ReplicaSequences(ids[:, :-1], ids[:, 1:], None, 0, 0)
    routes = ((0, 1), (0, 2), (0, 1), (2, 0))
    model = weights.model()
    loss = masked_backward(model, rows, routes)
    by_hand = weights.model()
    losses = []
    for number, route in enumerate(routes):
        part = slice(number, number + 1)
        with visiting(by_hand, route):
            losses.append(by_hand.loss_sum(ids[part, :-1], ids[part, 1:]))
    assert loss == pytest.approx(float(sum(losses).detach()) / 32)
    for name, parameter in by_hand.named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        tokens = 8 * sum(layer is None or layer in route for route in routes)
        (wanted,) = torch.autograd.grad(sum(losses) / tokens, parameter, retain_graph=True)
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, wanted)
    assert [len(model.blocks), len(by_hand.blocks)] == [3, 3]


def test_layers_of_routes_are_those_of_their_stages() -> None:
    work = skipping(4, 3)
    schedule = check_split(work, config().shape())
    for mb, layers in enumerate(layer_routes(config().shape(), schedule)):
        assert len(layers) == 3
        assert layers[0] == 0
        cells = [schedule.cell_of[stage] for stage in schedule.route(mb)]
        assert list(layers) == cells[:-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"vocab": "pp"}}, r"parallel\.vocab.*stage 0"),
        ({"parallel": {"dp": 2}, "shard": "zero2"}, "replicated or zero1 with schedule skippipe"),
        ({"parallel": {"pp": 5}}, "at most 4 stages"),
        ({"global_batch": 1}, "microbatches = 1"),
    ],
)
def test_splits_that_cannot_skip_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_split(skipping(4, 3, changes), config().shape())


def test_the_plain_reference_is_not_that_of_routes() -> None:
    work = skipping(4, 3)
    weights = SeededWeights(config(), 0, torch.float64)
    plain = one_process(work, weights, steps=1)
    model = weights.model()
    routes = layer_routes(config().shape(), check_split(work, config().shape()))
    loss = masked_backward(model, tokens(work, 53, 0, documents=False), routes)
    assert not same_as_one(work, config(), steps=1).same
    assert loss != pytest.approx(plain.losses[0], rel=1e-6)
