"""Which ranks compute which sequences: every token once, bounds, optima, bad input."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError, PlanError
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import ModelShape
from shoal.plan.balance import ASSIGNERS
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep
from shoal.plan.balance.sequences.buckets import bucketed
from shoal.plan.balance.sequences.bytescale import ByteScale
from shoal.plan.balance.sequences.fill import best_fit
from shoal.plan.balance.sequences.flexsp import FlexSP, best_homogeneous
from shoal.plan.balance.sequences.groups import RankPool, homogeneous, searched, solved
from shoal.plan.balance.sequences.lengths import read_lengths
from shoal.plan.balance.sequences.packed import PackedAssigner
from shoal.plan.balance.sequences.picture import draw
from shoal.plan.balance.sequences.predicted import predict

SHAPE = ModelShape(
    name="small",
    num_layers=2,
    hidden=64,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    ffn_hidden=128,
    vocab_size=100,
)
COST = SequenceCost.of(SHAPE, 1e9, [(2, 1e9), (64, 2e8)], fixed_s=1e-4)
PLAIN = SequenceCost(quadratic_s=1e-6, linear_s=1e-3)


def _of(name: str, capacity: int) -> Any:
    own = {"limit_s": 0.0} if name == "flexsp" else {}
    return ASSIGNERS.build({"name": name, "capacity_tokens": capacity, **own})


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=60),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from(sorted(ASSIGNERS)),
)
def test_every_sequence_once_within_what_ranks_hold(
    lengths: list[int], ranks: int, name: str
) -> None:
    part = _of(name, 200)
    try:
        plan = part.assign(lengths, ranks, COST)
    except PlanError as refused:
        assert max(lengths) > 200 * (1 << (ranks.bit_length() - 1))
        assert "the smallest group that could" in str(refused)
        return
    plan.check()
    for step in plan.steps:
        assert sum(lengths[one] for one in step.sequences) <= 200 * len(step.ranks)
    result = predict(plan, COST)
    assert 0.0 <= result.idle_share < 1.0
    assert result.step_s >= float(COST.compute_s(np.array(lengths)).sum()) / ranks
    if all(len(step.ranks) == 1 for step in plan.steps):
        assert result.exchange_bytes == 0.0


def test_a_sequence_takes_as_many_ranks_as_it_needs_and_not_a_power_of_two() -> None:
    plan = ByteScale(capacity_tokens=100).assign([299, 40, 101, 60], 5, COST)
    degrees = {step.sequences: len(step.ranks) for step in plan.steps}
    assert degrees[(0,)] == 3 and degrees[(2,)] == 2
    assert all(len(plan.of(rank)) for rank in range(5))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(2, 3))
def test_longest_first_is_within_its_bound(lengths: list[int], ranks: int) -> None:
    """Graham's bound against every assignment there is."""
    plan = ByteScale(capacity_tokens=100).assign(lengths, ranks, PLAIN)
    seconds = PLAIN.compute_s(np.array(lengths, dtype=np.float64))
    best = min(
        max(sum(s for s, at in zip(seconds, who, strict=True) if at == r) for r in range(ranks))
        for who in itertools.product(range(ranks), repeat=len(lengths))
    )
    assert predict(plan, PLAIN).step_s <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-9)


def test_work_is_balanced_by_time_and_not_by_tokens() -> None:
    cost = SequenceCost(quadratic_s=1.0, linear_s=0.0)
    plan = ByteScale(capacity_tokens=100).assign([100] + [10] * 100, 2, cost)
    alone = next(rank for rank in range(2) if any(0 in s.sequences for s in plan.of(rank)))
    tokens = sum(plan.lengths[n] for step in plan.of(alone) for n in step.sequences)
    assert tokens < 110 and predict(plan, cost).idle_share < 0.01


def test_packing_uses_few_buffers() -> None:
    order = [0, 1, 2, 3, 4, 5]
    assert len(best_fit(order, [6, 6, 5, 4, 4, 5], 10)) == 3
    assert best_fit([1, 0], [3, 7], 10) == [[1, 0]]


def test_offloading_takes_fewer_ranks() -> None:
    slow = SequenceCost(quadratic_s=1e-6, linear_s=1e-3, host_s=1e-3)
    kept = ByteScale(capacity_tokens=100).assign([800, 50], 8, slow)
    left = ByteScale(capacity_tokens=100, offload="auto").assign([800, 50], 8, slow)
    fewer, more = len(left.steps[0].ranks), len(kept.steps[0].ranks)
    assert fewer < more == 8
    ratio = left.steps[0].offloaded
    assert (
        (1 - ratio) * 800 / fewer <= 100 < (1 - slow.offloaded(800, fewer - 1)) * 800 / (fewer - 1)
    )
    with pytest.raises(PlanError, match="sequence 1 = '90000 tokens'"):
        nothing = SequenceCost(quadratic_s=0.0, linear_s=1e-9, host_s=1.0)
        ByteScale(capacity_tokens=100, offload="auto").assign([5, 90000], 8, nothing)


def test_static_groups_send_what_short_sequences_do_not_need() -> None:
    lengths = [800, *[20] * 200]
    static, dynamic = (_of(n, 100).assign(lengths, 8, COST) for n in ("packed", "bytescale"))
    assert {len(step.ranks) for step in static.steps} == {8}
    assert predict(dynamic, COST).exchange_bytes < predict(static, COST).exchange_bytes / 2
    assert predict(dynamic, COST).step_s < predict(static, COST).step_s


def _runs(values: Sequence[int], most: int) -> Iterator[list[list[int]]]:
    """Every way to cut a list in at most ``most`` runs."""
    number = len(values)
    for parts in range(1, min(most, number) + 1):
        for inner in itertools.combinations(range(1, number), parts - 1):
            ends = [0, *inner, number]
            yield [list(values[a:b]) for a, b in itertools.pairwise(ends)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 4))
def test_buckets_lose_the_least(lengths: list[int], most: int) -> None:
    def loss(buckets: list[list[int]]) -> int:
        return sum(max(bucket) * len(bucket) - sum(bucket) for bucket in buckets)

    result = bucketed(lengths, most)
    assert sorted(n for bucket in result for n in bucket) == list(range(len(lengths)))
    ours = loss([[lengths[n] for n in bucket] for bucket in result])
    assert len(result) <= most
    assert ours == min(loss(cut) for cut in _runs(sorted(lengths, reverse=True), most))


def _exhaustive(lengths: Sequence[int], pool: RankPool) -> float:
    """The fastest single pass of all: every cut of the ranks, every deal."""
    cuts = [c for c in ([4], [2, 2], [2, 1, 1], [1, 1, 1, 1]) if pool.ranks == 4]
    best = math.inf
    sizes = np.array(lengths, dtype=np.float64)
    for cut in cuts:
        for who in itertools.product(range(len(cut)), repeat=len(lengths)):
            own = [sizes[np.array(who) == group] for group in range(len(cut))]
            if all(x.sum() <= d * pool.capacity for d, x in zip(cut, own, strict=True)):
                seconds = max(pool.seconds(d, x) for d, x in zip(cut, own, strict=True))
                best = min(best, seconds)
    return best


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 350), min_size=1, max_size=5))
def test_the_program_finds_the_optimum(lengths: list[int]) -> None:
    pool = RankPool(4, 100, COST)
    best = _exhaustive(lengths, pool)
    known = searched(lengths, pool)
    result = solved(lengths, pool, buckets=16, limit_s=5.0, known=known)
    assert result.proven
    if math.isinf(best):
        assert not result.groups
        return
    assert result.seconds == pytest.approx(best, rel=2e-3)
    if known.groups:
        assert result.seconds <= known.seconds


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_never_worse_than_one_degree(lengths: list[int]) -> None:
    pool = RankPool(8, 100, COST)
    result = FlexSP(capacity_tokens=100, limit_s=0.0).solve(lengths, pool)
    assert result.seconds <= best_homogeneous(lengths, pool)[1] * (1 + 1e-9)
    one_after_another = sum(homogeneous([n], pool, 8).seconds for n in lengths)
    assert result.seconds <= one_after_another * (1 + 1e-9)


def test_ranks_that_are_no_power_of_two_leave_some_idle() -> None:
    plan = FlexSP(capacity_tokens=100, limit_s=0.0).assign([150, 80, 30], 6, COST)
    assert max(rank for step in plan.steps for rank in step.ranks) < 4


def test_ulysses_splits_no_head() -> None:
    few = SequenceCost(quadratic_s=1e-6, linear_s=1e-3, heads=4, kv_heads=2)
    assert RankPool(16, 100, few).degrees == [4, 2, 1]
    with pytest.raises(PlanError, match="the smallest group that could has 9 ranks"):
        FlexSP(capacity_tokens=100).assign([900], 16, few)


@pytest.mark.parametrize("name", sorted(ASSIGNERS))
@pytest.mark.parametrize(
    ("lengths", "told"),
    [([3, 0], "sequence 1 has 0 tokens"), ([], "sequences = 0"), ([1, 900], "sequence 1 = ")],
)
def test_bad_batches(name: str, lengths: list[int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        _of(name, 100).assign(lengths, 4, COST)


@pytest.mark.parametrize("name", sorted(ASSIGNERS))
def test_bad_options(name: str) -> None:
    with pytest.raises(ConfigError, match=f"assigner.{name}.capacity_tokens = 0"):
        _of(name, 0)


def test_bad_costs_and_plans() -> None:
    with pytest.raises(ConfigError, match=r"cost\.quadratic_s = nan"):
        SequenceCost(quadratic_s=math.nan, linear_s=1.0)
    with pytest.raises(PlanError, match="divisor of 4"):
        PackedAssigner(cp=3).assign([1], 4, COST)
    for steps, result in (
        ((), "sequence 0 in 0"),
        ((MicroStep((0,), (0,)), MicroStep((0,), (1,))), "sequence 0 in 2"),
        ((MicroStep((0,), (0, 0)),), "micro-step 0"),
        ((MicroStep((0,), (7,)),), "micro-step 0"),
    ):
        with pytest.raises(PlanError, match=result):
            Assignment((3,), 2, steps).check()


def test_the_cost_is_that_of_its_operations() -> None:
    assert COST.pass_s([10, 20], [0], "ring") == pytest.approx(
        COST.quadratic_s * 500 + COST.linear_s * 30 + 1e-4
    )
    # Two ranks: each sends its half of the keys and values once, twice and as gradients.
    assert COST.exchange_bytes(100, 2, "ring") == 2 * 50 * (2 * 64 * 2 * 2 + 2 * 64 * 4)
    near, far = (COST.pass_s([100], ranks, "ulysses") for ranks in ([0, 1], [1, 2]))
    assert near < far


def test_lengths_from_files(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, listed, keyed = (tmp_path / n for n in ("a.txt", "b.json", "c.json"))
    text.write_text("3 4\n5\n")
    listed.write_text("[3, 4, 5]")
    keyed.write_text(json.dumps({"tokens": [3, 4, 5]}))
    pq.write_table(pa.table({"length": [3, 4, 5]}), tmp_path / "d.parquet")
    assert read_lengths(text) == read_lengths(listed) == [3, 4, 5]
    assert read_lengths(keyed, "tokens") == read_lengths(tmp_path / "d.parquet") == [3, 4, 5]
    for name, said, result in (
        ("e.txt", "3 x", "no file of lengths"),
        ("f.json", "[3, 0]", "sequence 1 has length 0"),
        ("g.json", "{}", "name the column"),
        ("h.json", "[3.5]", "length 3.5"),
        ("i.txt", "", "1 to"),
    ):
        (tmp_path / name).write_text(said)
        with pytest.raises(DataError, match=result):
            read_lengths(tmp_path / name)
    with pytest.raises(DataError, match="no file of lengths"):
        read_lengths(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="expected one of length"):
        read_lengths(tmp_path / "d.parquet", "tokens")


def test_a_picture_has_every_micro_step() -> None:
    plan = ByteScale(capacity_tokens=100).assign([299, 40, 101, 60], 5, COST)
    drawn = draw([("bytescale", plan, predict(plan, COST))])
    assert drawn.count("<title>") == 1 + sum(len(step.ranks) for step in plan.steps)
