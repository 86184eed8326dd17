"""How much to swap: the least of T(A), against a scan of all amounts and against all subsets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.plan.memory.swap import SwapIteration, Swappable, SwapTensor, choose, curve

seconds = st.floats(0.0, 3.0)
amount = st.floats(0.0, 500.0)
rate = st.floats(1.0, 300.0)


@st.composite
def iterations(draw):
    times = {name: draw(seconds) for name in ("forward_s", "backward_s", "update_s")}
    sizes = (
        "forward_fetched", "backward_fetched", "gradients", "optimizer_read", "optimizer_written",
        "always", "free_host",
    )  # fmt: skip
    amounts = {name: draw(amount) for name in sizes}
    rates = {name: draw(rate) for name in ("down", "up", "read", "write")}
    return SwapIteration(**times, **amounts, **rates, before=draw(st.integers(0, 2)))


tensors = st.lists(
    st.builds(SwapTensor, nbytes=st.integers(1, 60), again_s=st.floats(0.0, 1.0)), max_size=14
)


@given(iterations(), tensors, st.floats(0.0, 1.0))
def test_the_least_of_a_dense_scan(iteration, found, share):
    ordered = Swappable(found)
    least = share * ordered.nbytes[-1]
    count, times = choose(iteration, ordered, least=least)
    every = [
        iteration.times(nbytes, again).seconds
        for nbytes, again in zip(ordered.nbytes, ordered.again_s, strict=True)
        if nbytes >= least
    ]
    assert times.seconds == pytest.approx(min(every), rel=1e-9)
    assert times.swapped == ordered.nbytes[count] >= least


@given(iterations(), st.lists(st.floats(0.0, 1.0), max_size=8))
def test_no_subset_of_equal_tensors_is_better(iteration, worth):
    results = [SwapTensor(nbytes=20, again_s=s) for s in worth]
    best = choose(iteration, Swappable(results))[1].seconds
    for size in range(len(results) + 1):
        for chosen in itertools.combinations(results, size):
            again = sum(s.again_s for s in results) - sum(s.again_s for s in chosen)
            assert best <= iteration.times(20 * size, max(0.0, again)).seconds * (1 + 1e-9)


@given(iterations(), tensors)
def test_it_is_convex(iteration, found):
    ordered = Swappable(found)
    points = [
        (nbytes, iteration.times(nbytes, again).seconds)
        for nbytes, again in zip(ordered.nbytes, ordered.again_s, strict=True)
    ]
    for (a, low), (b, middle), (c, high) in zip(points, points[1:], points[2:], strict=False):
        line = low + (high - low) * (b - a) / (c - a)
        assert middle <= line + 1e-9


def test_what_binds_and_by_how_much():
    iteration = SwapIteration(
        forward_s=1.0, backward_s=2.0, backward_fetched=100, optimizer_read=300, gradients=100,
        optimizer_written=350, update_s=0.5, free_host=50, down=100, up=100, read=200, write=100,
    )  # fmt: skip
    results = [SwapTensor(nbytes=100, again_s=1.0), SwapTensor(nbytes=100, again_s=0.5)]
    one, two, three = curve(iteration, Swappable(results), 3)
    assert (one.swapped, two.swapped, three.swapped) == (0, 100, 200)
    # Nothing: 1 + max(2 + 1.5, 350 / 100). One: the disk takes 50 more, written in the forward pass
    # and read in the backward one. Both: the link down takes 2 s, and so do reading and computing.
    assert one.seconds == 1.0 + 3.5
    assert two.seconds == 1.0 + 3.5
    assert two.backward_s["compute"] == 2.5
    assert two.binds == ("compute", "write")
    assert three.seconds == 2.0 + 3.5
    assert three.spilled == 150
    before = iteration.model_copy(update={"before": 2})
    assert before.times(0, 0.0).before_s == 2 * (1.0 + 2.0)


def test_bad_input():
    ordered = Swappable([SwapTensor(nbytes=10, again_s=1.0)])
    iteration = SwapIteration(forward_s=1.0, backward_s=1.0, down=1, up=1, read=1, write=1)
    with pytest.raises(PlanError, match="swapped bytes = 11: expected at most the 10"):
        choose(iteration, ordered, least=11)
    with pytest.raises(PlanError, match="points = 1"):
        curve(iteration, ordered, 1)
    assert choose(iteration, Swappable([]))[0] == 0
