"""Hybrid data parallelism: any assignment of ragged sequences equals one process, and ends."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_splits import config, job

from shoal.claims.lab.same_as_one import same_as_one, tokens
from shoal.claims.lab.thread_ranks import ThreadComm
from shoal.core.errors import PlanError
from shoal.ir import TrainJob
from shoal.parallel.hdp.runtime import HybridRuntime, sequences_of
from shoal.parallel.hdp.slices import SequenceSegment, segments, shares
from shoal.parallel.legal import check_split
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _job(batching: Any, ranks: int, **changes: Any) -> TrainJob:
    return job({"dp": ranks}, **{"microbatch": None, "batching": batching, **changes})


def _small(**changes: Any):
    return config(**{"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, **changes})


def test_segments_are_runs_of_a_document() -> None:
    ids = np.array([[0, 0, 1, 1], [-1, 5, 5, -1]])
    assert segments(ids, 2, 4) == [
        SequenceSegment(0, 0, 2),
        SequenceSegment(0, 2, 4),
        SequenceSegment(1, 1, 3),
    ]
    assert segments(None, 2, 4) == [SequenceSegment(0, 0, 4), SequenceSegment(1, 0, 4)]


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from(["ring", "ulysses"]))
def test_every_token_is_with_one_rank(total: int, degree: int, exchange: Any) -> None:
    result = shares(total, degree, exchange)
    assert sorted(np.concatenate(result).tolist()) == list(range(total))
    assert all(bool(np.all(np.diff(share) > 0)) for share in result)
    assert max(map(len, result)) <= -(-total // degree) + (exchange == "ring")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batching", "changes"),
    [
        ({"name": "bytescale", "capacity_tokens": 6}, {"shard": "zero1", "dropout": 0.2}),
        ({"name": "flexsp", "capacity_tokens": 16, "limit_s": 0.2}, {"recompute": "full"}),
        ({"name": "packed", "capacity_tokens": 6, "cp": 4}, {}),
    ],
)
def test_assigners_equal_one_process(batching: Any, changes: dict[str, Any]) -> None:
    result = same_as_one(
        _job(batching, 4, **changes), _small(num_layers=1), steps=2, documents=True
    )
    assert result.same, result


def test_rows_without_documents_are_sequences() -> None:
    result = same_as_one(_job({"name": "bytescale", "capacity_tokens": 7}, 4), _small(), steps=1)
    assert result.same, result


@st.composite
def _plans(draw: st.DrawFn, lengths: list[int], ranks: int) -> Assignment:
    """Any sequences behind each other on any ranks, in any order."""
    left = draw(st.permutations(range(len(lengths))))
    steps = []
    while left:
        count = draw(st.integers(1, min(4, len(left))))
        group = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
        steps.append(MicroStep(tuple(left[:count]), tuple(group)))
        left = left[count:]
    return Assignment(
        tuple(lengths), ranks, tuple(steps), draw(st.sampled_from(["ring", "ulysses"]))
    )


def _legal(plan: Assignment) -> bool:
    """Ulysses does not split the two key/value heads of four unevenly."""
    return plan.exchange == "ring" or all(len(s.ranks) in (1, 2, 4) for s in plan.steps)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(2, 4), st.sampled_from(["replicated", "zero1"]), st.integers(0, 99))
def test_any_assignment_equals_one_process(
    data: st.DataObject, ranks: int, shard: str, seed: int
) -> None:
    chosen = _job("bytescale", ranks, shard=shard, seed=seed, global_batch=12)
    lengths = [one.length for one in sequences_of(tokens(chosen, 53, 0, documents=True))]
    plan = data.draw(_plans(lengths, ranks).filter(_legal))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridRuntime, "planned", lambda self, rows: plan)
        result = same_as_one(chosen, _small(num_layers=1), steps=1, documents=True)
    assert result.same, (plan, result)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(0, 99))
def test_late_ranks_hold_up_nobody_for_ever(data: st.DataObject, seed: int) -> None:
    """Threads end at once, with an error, where all wait for each other."""
    chosen = _job("bytescale", 4, global_batch=8, seed=seed)
    lengths = [one.length for one in sequences_of(tokens(chosen, 53, 0, documents=True))]
    plan = data.draw(_plans(lengths, 4).filter(_legal))
    send, receive = ThreadComm.send, ThreadComm.receive
    source = random.Random(seed)

    def late(call: Any) -> Any:
        def issued(*args: Any, **kwargs: Any) -> Any:
            time.sleep(source.random() * 2e-3)
            return call(*args, **kwargs)

        return issued

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridRuntime, "planned", lambda self, rows: plan)
        patch.setattr(ThreadComm, "send", late(send))
        patch.setattr(ThreadComm, "receive", late(receive))
        assert same_as_one(chosen, _small(num_layers=1), steps=1, documents=True).same


def test_plans_of_other_batches_are_refused() -> None:
    other = Assignment((3, 4), 2, (MicroStep((0, 1), (0,)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HybridRuntime, "planned", lambda self, rows: other)
        with pytest.raises(PlanError, match="sequence 2 in 0 micro-steps"):
            same_as_one(_job("bytescale", 2), _small(), steps=1)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"shard": "zero2"}, "shard"),
        ({"shard": "zero3"}, "shard"),
        ({"parallel": {"dp": 2, "tp": 2}}, "parallel"),
        ({"recompute": "stage"}, "recompute"),
        ({"sync": {"name": "local_sgd", "tau": 2}}, "sync"),
        (
            {"batching": {"name": "bytescale", "offload": "auto"}, "recompute": "full"},
            "recompute",
        ),
        ({"batching": {"name": "bytescale", "capacity_tokens": 7}}, "16 tokens"),
        ({"batching": {"name": "flexsp", "capacity_tokens": 1}}, "16 ranks"),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], where: str) -> None:
    given = {"microbatch": None, "batching": "bytescale", "parallel": {"dp": 2}, **changes}
    with pytest.raises(PlanError, match=where):
        check_split(job(**given), _small().shape())
