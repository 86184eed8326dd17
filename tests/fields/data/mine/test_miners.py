"""The miners find the same sets: brute force, Python, and pyfim are the oracles."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from shoal.core.errors import BuildError
from shoal.core.native import cpu_flags
from shoal.core.parts import table
from shoal.fields.data.mine.baskets import Baskets, from_lists, from_matrix
from shoal.fields.data.mine.generator import heaton_baskets
from shoal.fields.data.mine.miners import native, reference
from shoal.fields.data.mine.planning import choose_miner
from shoal.fields.data.mine.protocols import (
    MineError,
    MiningProblem,
    TooManyError,
    least_support,
)

MINERS = tuple(table("miner"))
TARGETS = ("all", "closed", "maximal")
BUILDS = [(), ("-DSHOAL_SCALAR",), ("-mno-avx512f", "-mno-bmi2")]
if "avx512f" in cpu_flags():
    BUILDS.append(("-mno-avx512vpopcntdq",))


def mined(name, problem, **options):
    return table("miner").build({"name": name, **options}).mine(problem)


def brute(baskets, least, target="all", max_len=None):
    """Every subset of the items, counted basket by basket."""
    rows = [set(row) for row in baskets.to_lists()]
    items = sorted(set().union(*rows)) if rows else []
    longest = max_len or len(items)
    found = {}
    for size in range(1, longest + 1):
        for some in itertools.combinations(items, size):
            count = sum(set(some) <= row for row in rows)
            if count >= least:
                found[frozenset(some)] = count
    if target == "all":
        return found

    def beaten(one):
        above = (other for other in found if one < other)
        return any(target == "maximal" or found[other] == found[one] for other in above)

    return {one: count for one, count in found.items() if not beaten(one)}


lists = st.lists(st.lists(st.integers(0, 8), max_size=9), max_size=14)


@settings(max_examples=60, deadline=None)
@given(rows=lists, least=st.integers(1, 5), max_len=st.sampled_from([None, 1, 2, 3]))
def test_brute_force(rows, least, max_len) -> None:
    """Duplicates in a basket count once, empty baskets are there."""
    baskets = from_lists(rows)
    for target in TARGETS:
        expected = brute(baskets, least, target, max_len)
        problem = MiningProblem(baskets, least, target=target, max_len=max_len)
        assert reference.mine(problem).as_dict() == expected
        for name in MINERS:
            assert mined(name, problem).as_dict() == expected, (name, target)
        assert mined("eclat", problem, bit_density=1.0).as_dict() == expected
        assert mined("eclat", problem, bit_density=0.0).as_dict() == expected


def shapes():
    draw = np.random.default_rng(3)
    yield "planted", heaton_baskets(2000, 12, 0.5, seed=1), 60
    yield "dense", from_matrix(draw.random((300, 16)) < 0.6), 60
    yield "wide", from_matrix(draw.random((3000, 40)) < 0.25), 120
    sparse = np.minimum(draw.zipf(1.5, (4000, 12)), 500).astype(np.int32)
    yield "sparse", Baskets(np.arange(0, 48_001, 12), sparse.ravel(), np.arange(501)), 12
    few = from_matrix(draw.random((5000, 7)) < 0.5)
    yield "alike", few, 5
    chained = from_lists([list(range(draw.integers(1, 14))) for _ in range(200)])
    yield "one path", chained, 12
    yield "in all", from_lists([[0, 1, 2, *row] for row in chained.to_lists()[:60]]), 9


SHAPES = list(shapes())


@pytest.mark.parametrize(("name", "baskets", "least"), SHAPES, ids=[one[0] for one in SHAPES])
def test_miners_agree(name, baskets, least) -> None:
    for target in TARGETS:
        problem = MiningProblem(baskets, least, target=target)
        first, *others = (mined(name, problem) for name in MINERS)
        assert len(first) > (10 if target == "all" else 0)
        for other in others:
            assert first.same_as(other)
        for density in (0.0, 1.0):
            assert first.same_as(mined("eclat", problem, bit_density=density))
        assert not first.same_as(first.take(np.arange(1, len(first))))
        assert not first.same_as(replace(first, support=first.support + 1))


@pytest.mark.slow
@pytest.mark.parametrize("flags", BUILDS[1:], ids=str)
def test_other_processors(flags, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel without its vectors finds the same."""
    _, baskets, least = SHAPES[2]
    problems = [MiningProblem(baskets, least, target=target) for target in TARGETS]
    expected = [[mined(name, problem) for name in MINERS] for problem in problems]
    library = native.native(*flags)
    assert library is not None
    monkeypatch.setattr(native, "native", lambda: library)
    for problem, row in zip(problems, expected, strict=True):
        for name, before in zip(MINERS, row, strict=True):
            assert before.same_as(mined(name, problem))


@pytest.mark.parametrize(("name", "baskets", "least"), SHAPES, ids=[one[0] for one in SHAPES])
def test_pyfim_agrees(name, baskets, least) -> None:
    fim = pytest.importorskip("fim")
    rows = [list(map(int, row)) for row in np.split(baskets.ids, baskets.begins[1:-1])]
    for target, letter in (("all", "s"), ("closed", "c"), ("maximal", "m")):
        theirs = fim.fpgrowth(rows, target=letter, supp=-least, zmin=1, report="a")
        problem = MiningProblem(baskets, least, target=target)
        ours = replace(mined("eclat", problem), names=np.arange(baskets.num_items))
        # pyfim leaves out sets of nothing but items that are in every basket.
        most = baskets.num_baskets - 1
        kept = {one: count for one, count in ours.as_dict().items() if count <= most}
        assert kept == {frozenset(items): count for items, count in theirs if count <= most}


def test_counting_again() -> None:
    _, baskets, least = SHAPES[3]
    found = mined("eclat", MiningProblem(baskets, least)).ordered()
    assert np.array_equal(native.recount(baskets, found), found.support)
    some = baskets.rows(np.arange(0, baskets.num_baskets, 7))
    again = native.recount(some, found)
    assert np.array_equal(again, reference.recount(some, found))
    assert (again < found.support).any()


def test_rules() -> None:
    _, baskets, least = SHAPES[0]
    found = mined("eclat", MiningProblem(baskets, least, max_len=4))
    ours = native.find_rules(found, 0.9)
    theirs = reference.find_rules(found, 0.9)
    assert len(ours.sets) > 20
    assert sorted(zip(*ours, strict=True)) == sorted(zip(*theirs, strict=True))
    with pytest.raises(TooManyError, match="rules: more than 3 "):
        native.find_rules(found, 0.9, 3)


def test_too_many_sets_are_refused_early() -> None:
    baskets = from_lists([list(range(50))] * 20)  # 2^50 sets
    for name in MINERS:
        with pytest.raises(TooManyError, match=r"max_itemsets = 1,000, .* max_len or target"):
            mined(name, MiningProblem(baskets, 2, max_itemsets=1000))
    (whole,) = mined("eclat", MiningProblem(baskets, 2, target="maximal", max_itemsets=9)).lengths
    assert whole == 50
    (closed,) = mined("eclat", MiningProblem(baskets, 2, target="closed", max_itemsets=9)).lengths
    assert closed == 50


def test_a_search_can_be_stopped() -> None:
    draw = np.random.default_rng(0)
    baskets = from_matrix(draw.random((2000, 24)) < 0.7)

    def stop(done: float, sets: int) -> None:
        raise KeyboardInterrupt

    for name in MINERS:
        with pytest.raises(KeyboardInterrupt):
            mined(name, MiningProblem(baskets, 200, max_itemsets=10**6, tick=stop))


@pytest.mark.parametrize("bad", [0, -3, 0.0, -0.5, 1.5, float("nan"), True, "1", None])
def test_support_out_of_bounds(bad) -> None:
    with pytest.raises(MineError, match="min_support = "):
        least_support(bad, 10)


def test_support_is_rounded_up() -> None:
    assert least_support(0.3, 10) == 3  # 3.0000000000000004 in floats
    assert least_support(0.31, 10) == 4
    assert least_support(1.0, 10) == 10
    assert least_support(1, 10) == 1
    assert least_support(1e-9, 10) == 1


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given, **more):
        raise BuildError("no compiler")

    _, baskets, least = SHAPES[1]
    problem = MiningProblem(baskets, least)
    expected = mined("eclat", problem)
    monkeypatch.setattr(native, "build", refuse)
    native.native.cache_clear()
    try:
        with pytest.warns(UserWarning, match="some hundred times slower: no compiler"):
            found = mined("fpgrowth", problem)
        assert found.same_as(expected)
        assert np.array_equal(native.recount(baskets, found.ordered()), found.ordered().support)
        assert len(native.find_rules(found, 0.5).sets)
        assert native.keep(found, "maximal").any()
    finally:
        native.native.cache_clear()


@pytest.mark.parametrize(("name", "baskets", "least"), SHAPES, ids=[one[0] for one in SHAPES])
def test_the_choice_is_one_of_the_miners(name, baskets, least, shared_home) -> None:
    problem = MiningProblem(baskets, least)
    chosen = choose_miner(problem)
    assert table("miner").name_of(type(chosen)) in MINERS
    assert chosen == choose_miner(problem)
