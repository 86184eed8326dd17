"""The cost of boxing: closed formulas, lower bounds, and ways through other placements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_transfer import disjoint_elements

from shoal.core.errors import PlanError
from shoal.cost.price.boxing import boxing, is_view, step_elements
from shoal.ir.placement import (
    Broadcast,
    Partial,
    check_placement,
    chunk,
    coordinates,
    every_placement,
    largest_part,
    local_box,
    parse_mesh,
    parse_placement,
    show_placement,
)

P = parse_placement


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_one_axis_is_the_table(p: int) -> None:
    size = 24 * 24
    table = boxing((24, 24), (p,))
    expected = {
        ("S(0)", "S(1)"): (p - 1) * size // p,
        ("S(0)", "S(0)"): 0,
        ("S(1)", "B"): (p - 1) * size,
        ("S(1)", "P"): 0,
        ("B", "S(0)"): 0,
        ("B", "B"): 0,
        ("B", "P"): 0,
        ("P", "S(1)"): (p - 1) * size,
        ("P", "B"): 2 * (p - 1) * size,
        ("P", "P"): 0,
        ("P(max)", "B"): 2 * (p - 1) * size,
    }
    for (source, target), elements in expected.items():
        assert table.cost(P(source), P(target)) == elements, (source, target)


@pytest.mark.parametrize(
    ("source", "target", "elements"),
    [
        ("S(0)", "S(1)", 1), ("S(0)", "P", 1), ("B", "S(0)", 1), ("B", "P", 1),
        ("S(0)", "B", 4), ("B", "B", 4),
        ("P", "S(0)", 3), ("P", "P", 3), ("P", "B", 3 + 4 - 1),
    ],
)  # fmt: skip
def test_other_ranks_are_the_table(source: str, target: str, elements: int) -> None:
    assert disjoint_elements(10, P(source), P(target), 3, 4) == 10 * elements


def test_ways_through_other_placements() -> None:
    table = boxing((8, 8), (2, 2))
    # Each rank lacks a half of its columns: nothing cheaper can be.
    assert table.cost(P("S(0),B"), P("B,S(0)")) == 2 * 32
    # The outer axis cannot sum up what the inner one has split further.
    assert step_elements((8, 8), (2, 2), P("S(0),S(0)"), P("P,S(0)")) is None
    assert len(table.route(P("S(0),S(0)"), P("P,S(0)"))) == 2
    steps = table.route(P("P,P"), P("S(0),S(1)"))
    assert [step.name for step in steps] == ["reduce_scatter", "reduce_scatter"]
    assert sum(step.elements for step in steps) == table.cost(P("P,P"), P("S(0),S(1)"))
    assert [step.name for step in table.route(P("B,B"), P("S(0),S(0)"))] == ["slice"]
    assert not is_view(P("B,S(0)"), P("S(0),S(0)"))


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 5)),
    st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2)]),
)
def test_costs_are_a_distance_and_never_below_what_ranks_lack(
    shape: tuple[int, int], mesh: tuple[int, ...]
) -> None:
    table = boxing(shape, mesh)
    n = len(table.placements)
    for i in range(n):
        assert table.elements[i, i] == 0
        assert (table.elements[i, :, None] + table.elements >= table.elements[i] - 1e-9).all()
    for p in table.placements:
        for q in table.placements:
            if any(isinstance(axis, Partial) for axis in (*p, *q)):
                continue
            lacking = 0
            for coord in coordinates(mesh):
                box, own = local_box(shape, q, mesh, coord), local_box(shape, p, mesh, coord)
                common = box.intersect(own)
                lacking += box.volume - (common.volume if common else 0)
            assert table.cost(p, q) == lacking


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.sampled_from([(3,), (2, 2), (2, 3), (4, 2)]))
def test_parts_cover_a_tensor_once_and_the_first_is_largest(
    size: int, mesh: tuple[int, ...]
) -> None:
    for placement in every_placement(1, len(mesh)):
        boxes = [local_box((size,), placement, mesh, coord) for coord in coordinates(mesh)]
        whole = tuple(Broadcast() for _ in mesh)
        copies = math.prod(
            n for n, axis in zip(mesh, placement, strict=True) if axis == Broadcast()
        ) * math.prod(n for n, axis in zip(mesh, placement, strict=True) if axis == Partial())
        assert sum(box.volume for box in boxes) == size * copies
        assert max(box.volume for box in boxes) == largest_part((size,), placement, mesh)
        assert all(box.inside((size,)) for box in boxes)
        assert local_box((size,), whole, mesh, (0,) * len(mesh)).shape == (size,)
    assert [chunk(0, 5, 4, i) for i in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]


def test_placements_are_read_and_written() -> None:
    for placement in every_placement(2, 2, ("sum", "max")):
        assert P(show_placement(placement)) == placement
    assert P("S0, b,P") == P("S(0),B,P(sum)")
    assert parse_mesh("2x4") == (2, 4)


@pytest.mark.parametrize("text", ["", "S", "S(0),", "Q", "P(mean)", "S(a)"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="one entry for each axis"):
        P(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [("S(2),B", "0 to 1"), ("S(0)", "2 entries"), ("P(sum),P(max)", "not both")],
)
def test_what_does_not_fit_a_tensor_is_refused(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        check_placement(P(text), (4, 4), (2, 2))
    assert check_placement(P("S(-1),B"), (4, 4), (2, 2)) == P("S(1),B")
    with pytest.raises(PlanError, match="use B"):
        check_placement(P("S(0)"), (), (2,))
    with pytest.raises(PlanError, match="mesh"):
        parse_mesh("2x")
