"""Activations of long sequences on the host: equal to one process, and as many bytes as planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.errors import ConfigError, PlanError
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import TrainJob
from shoal.memory.activations import offloaded as away
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.hdp.offload import HostShare
from shoal.parallel.hdp.runtime import HybridRuntime, sequences_of
from shoal.parallel.hdp.slices import shares
from shoal.parallel.legal import check_split
from shoal.parallel.shard.units import units
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep
from shoal.plan.balance.sequences.bytescale import ByteScale
from shoal.plan.balance.sequences.predicted import predict

LENGTH = 64


@pytest.fixture(autouse=True)
def _small_tensors_go_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(away, "LEAST", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(**changes: Any) -> ModelConfig:
    return config(**{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **changes})


def one(ranks: int, capacity: int, **changes: Any) -> TrainJob:
    batching = {"name": "bytescale", "capacity_tokens": capacity, "offload": "auto"}
    return job({"dp": ranks}, **{"microbatch": None, "batching": batching, **changes})


def cost(ratio: float, ranks: int, length: int = LENGTH) -> SequenceCost:
    """Of a machine whose host takes ``ratio`` of the activations of ``length`` tokens."""
    shape = model().shape()
    free = SequenceCost.of(shape, 1e9, [(ranks, 1e12)], itemsize=4)
    per_token = (free.quadratic_s * length + free.linear_s) / 3
    rate = ratio * free.kept_bytes / per_token
    return SequenceCost.of(shape, 1e9, [(ranks, 1e12)], itemsize=4, host_bytes_per_s=rate)


@pytest.mark.parametrize("share", [0.4, pytest.param(1.0, marks=pytest.mark.slow)])
def test_any_share_equals_one_process(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = one(3, 1, dropout=0.2, global_batch=3)
    lengths = [s.length for s in sequences_of(tokens(chosen, 53, 0, documents=True))]
    steps = [MicroStep((n,), ((0, 1), (2,), (0, 1, 2))[n % 3], share) for n in range(len(lengths))]
    steps[1] = steps[1]._replace(offloaded=0.0)
    plan = Assignment(tuple(lengths), 3, tuple(steps))
    monkeypatch.setattr(HybridRuntime, "planned", lambda self, rows: plan)
    # The oracle's engines know no host: any share may be planned, but none is found.
    monkeypatch.setattr(ByteScale, "assign", lambda *_: plan)
    result = same_as_one(chosen, model(), steps=1, documents=True)
    assert result.same, result


def test_a_gradient_that_is_not_brought_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle sees bytes of the host that are not those that went there."""
    unpack = away.StorageOffload.unpack

    def spoilt(self: Any, slip: Any) -> torch.Tensor:
        result = unpack(self, slip)
        return (
            result * 1.001 if result.is_floating_point() and slip.away.source() is None else result
        )

    monkeypatch.setattr(away.StorageOffload, "unpack", spoilt)
    chosen = one(1, LENGTH, global_batch=1)
    plan = Assignment((16,), 1, (MicroStep((0,), (0,), 1.0),))
    monkeypatch.setattr(HybridRuntime, "planned", lambda self, rows: plan)
    assert not same_as_one(chosen, model(), steps=1).same


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0])
def test_bytes_kept_and_sent_are_those_of_the_plan(ratio: float) -> None:
    ranks, capacity = 4, 24
    chosen = one(ranks, capacity, seq_len=LENGTH, global_batch=4)
    price = cost(ratio, ranks)
    weights = SeededWeights(model(), dtype=torch.float32)

    def run(comm: Any) -> tuple[int, int, Assignment]:
        schedule = check_split(chosen, model().shape())
        engine = ParallelEngine(chosen, schedule, weights, comm, dtype=torch.float32, cost=price)
        engine.backward(tokens(chosen, 53, 0, documents=False), 1, 100.0)
        hybrid = engine.hooks["sequences"]
        assert isinstance(hybrid, HybridRuntime) and hybrid.host is not None
        host, plan = hybrid.host, hybrid.plan
        hybrid.close()
        assert plan is not None
        return host.kept_bytes, host.sent_bytes, plan

    result = run_ranks(ranks, run)
    plan = result[0][2]
    # (1 - r) 64 / d tokens fit; without the host it takes three ranks.
    degree = max(1, math.ceil((1 - ratio) * LENGTH / capacity - 1e-9))
    assert {len(step.ranks) for step in plan.steps} == {degree}
    # The gate's input of a layer, the largest that a block keeps.
    largest = LENGTH * 2 * model().ffn_hidden * 4
    for rank, (kept, sent, _) in enumerate(result):
        mine = [
            (step.offloaded, len(shares(LENGTH, degree, "ring")[step.ranks.index(rank)]))
            for step in plan.of(rank)
        ]
        planned = max((1 - r) * price.kept_bytes * n for r, n in mine)
        assert planned - largest <= kept <= planned + 1
        gone = sum(r * price.kept_bytes * n for r, n in mine)
        assert gone - 1 <= sent <= gone + len(mine) * largest
    predicted = predict(plan, price)
    assert max(kept for kept, _, _ in result) <= predicted.kept_bytes + 1
    assert predicted.kept_bytes <= capacity * price.kept_bytes * (1 + 1e-9)
    assert predicted.host_bytes == pytest.approx(
        ratio * price.kept_bytes * LENGTH / degree, rel=0.1
    )


def test_what_went_takes_no_room() -> None:
    """The bytes that operators have left behind, as the device counts them."""
    chosen = one(1, LENGTH, seq_len=LENGTH, global_batch=1)
    weights = SeededWeights(model(), dtype=torch.float32)

    def run(comm: Any) -> list[tuple[int, int]]:
        engine = ParallelEngine(
            chosen, check_split(chosen, model().shape()), weights, comm, dtype=torch.float32
        )
        rows = tokens(chosen, 53, 0, documents=False)
        plan = Assignment((LENGTH,), 1, (MicroStep((0,), (0,)),))
        hybrid = engine.hooks["sequences"]
        assert isinstance(hybrid, HybridRuntime)
        batch = hybrid.microbatch(rows, sequences_of(rows), plan.steps[0], plan)
        results = []
        for ratio in (0.0, 0.5, 1.0):
            host = HostShare(engine.local, units(engine.local)[0], device="cpu", host_bytes=2**26)
            host._opened()
            assert host._tiers is not None
            with host._tiers.scope as scope:
                with host.during(ratio):
                    loss = hybrid.stage(None, batch)
                results.append((scope.live_bytes, host.sent_bytes))
                loss.backward()
            host.close()
        return results

    (whole, none), *others = run_ranks(1, run)[0]
    assert none == 0
    for live, sent in others:
        assert sent > 0 and whole - live == sent


def test_a_sequence_that_no_pool_holds_is_named_before_the_first_step() -> None:
    chosen = one(2, 10, seq_len=LENGTH, global_batch=2)
    schedule = check_split(chosen, model().shape())
    weights = SeededWeights(model(), dtype=torch.float32)

    def run(comm: Any) -> None:
        ParallelEngine(chosen, schedule, weights, comm, dtype=torch.float32, cost=cost(0.5, 2))

    text = r"sequence 0 = '64 tokens'.* 50% of its activations .* group that could has 4 ranks"
    with pytest.raises(PlanError, match=text):
        run_ranks(2, run)


@pytest.mark.parametrize("name", ["quadratic_s", "linear_s", "fixed_s", "host_s", "kept_bytes"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_fits_that_are_no_numbers_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"cost.{name} = "):
        SequenceCost(**{"quadratic_s": 1e-6, "linear_s": 1e-3, name: value})


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity_tokens = 0"):
        check_split(one(2, 0), model().shape())
