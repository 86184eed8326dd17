"""Boxes against brute force over element sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.boxes import Box, uncovered

SIDE = 5


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.offset, box.stop, strict=True))))


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    offset = tuple(draw(st.integers(0, SIDE)) for _ in range(dims))
    return Box(offset, tuple(draw(st.integers(0, SIDE - o)) for o in offset))


@st.composite
def several(draw: st.DrawFn) -> list[Box]:
    dims = draw(st.integers(0, 3))
    return draw(st.lists(boxes(dims), min_size=2, max_size=6))


@given(several())
def test_intersection_is_the_common_cells(given_boxes: list[Box]) -> None:
    a, b = given_boxes[:2]
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    assert a.intersect(b) == b.intersect(a)


@given(several())
def test_subtraction_is_disjoint_and_exact(given_boxes: list[Box]) -> None:
    a, b = given_boxes[:2]
    rest = a.subtract(b)
    assert sum(one.volume for one in rest) == len(cells(a) - cells(b))
    assert set().union(*map(cells, rest)) == cells(a) - cells(b)
    assert all(one.volume for one in rest)


@given(several())
def test_uncovered_is_what_no_box_holds(given_boxes: list[Box]) -> None:
    target, *held = given_boxes
    left = uncovered(target, held)
    assert set().union(*map(cells, left)) == cells(target) - set().union(*map(cells, held))
    assert sum(one.volume for one in left) == len(set().union(*map(cells, left)))


@given(several())
def test_slices_pick_the_box(given_boxes: list[Box]) -> None:
    a, b = given_boxes[:2]
    common = a.intersect(b)
    if common is not None:
        picked = [
            range(o, o + s)[cut]
            for o, s, cut in zip(a.offset, a.shape, common.slices(a), strict=True)
        ]
        assert set(itertools.product(*picked)) == cells(common)


def test_inside_refuses_what_sticks_out() -> None:
    assert Box((1,), (2,)).inside((3,))
    assert not Box((1,), (3,)).inside((3,))
    assert not Box((-1,), (1,)).inside((3,))
    assert not Box((0, 0), (1, 1)).inside((3,))
    assert Box((), ()).inside(()) and Box((), ()).volume == 1
    assert str(Box((1, 0), (2, 3))) == "[1:3, 0:3]"
