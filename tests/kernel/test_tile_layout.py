"""The algebra of layouts against the formulas it is defined by."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import KernelError
from shoal.kernel import tile
from shoal.kernel.tile.layout import TileLayout
from shoal.kernel.tile.passes import plain
from shoal.kernel.tile.target import CUDA, HOST

quick = settings(deadline=None, max_examples=25)
PRIMITIVES = (tile.local, tile.spatial, tile.column_local, tile.column_spatial)


@st.composite
def layouts(draw: st.DrawFn, rank: int = 2) -> TileLayout:
    out = tile.local(*(1,) * rank)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from((*PRIMITIVES, None)))
        if kind is None:
            out = out * tile.replicate(draw(st.integers(1, 3)), rank)
        else:
            out = out * kind(*(draw(st.integers(1, 4)) for _ in range(rank)))
    return out


@quick
@given(layouts(), layouts())
def test_product_is_the_documented_formula(f: TileLayout, g: TileLayout) -> None:
    h = f * g
    assert h.shape == tuple(a * b for a, b in zip(f.shape, g.shape, strict=True))
    assert h.num_threads == f.num_threads * g.num_threads
    assert h.num_local == f.num_local * g.num_local
    result, outer, inner = h.table(), f.table(), g.table()
    for tf, tg in product(range(f.num_threads), range(g.num_threads)):
        thread = result[tf * g.num_threads + tg].reshape(f.num_local, g.num_local, -1)
        assert (thread == (outer[tf] * g.shape)[:, None] + inner[tg]).all()


@quick
@given(layouts(), layouts(), layouts())
def test_product_is_associative(a: TileLayout, b: TileLayout, c: TileLayout) -> None:
    assert (a * b) * c == a * (b * c)


def test_product_does_not_commute() -> None:
    a, b = tile.local(2, 1), tile.spatial(2, 2)
    assert not (a * b).same(b * a)


@quick
@given(layouts(), layouts())
def test_division_undoes_the_product(f: TileLayout, g: TileLayout) -> None:
    result = (f * g) / g
    assert result.same(f)
    assert (result * g).same(f * g)


@quick
@given(layouts(), layouts())
def test_canonical_forms_are_equal_where_the_maps_are(a: TileLayout, b: TileLayout) -> None:
    assert np.array_equal(a.canonical().table(), a.table())
    equal = a.table().shape == b.table().shape and np.array_equal(a.table(), b.table())
    assert a.same(b) == (equal and a.shape == b.shape)


@quick
@given(layouts())
def test_every_index_is_held_as_often(layout: TileLayout) -> None:
    flat = layout.table().reshape(-1, 2) @ [layout.shape[1], 1]
    counts = np.bincount(flat, minlength=math.prod(layout.shape))
    assert (counts == counts[0]).all()
    assert counts[0] == layout.num_threads * layout.num_local / math.prod(layout.shape)
    assert layout.holders(layout.index(0, 0))[0] == (0, 0)


def test_result_of_the_tensor_core() -> None:
    layout = tile.local(2, 1) * tile.spatial(8, 4) * tile.local(1, 2)
    for thread, place in product(range(32), range(4)):
        row, column = thread // 4 + 8 * (place // 2), 2 * (thread % 4) + place % 2
        assert layout.index(thread, place) == (row, column)
    assert layout.same(CUDA.c(16, 8, 1))
    assert "16:2" not in tile.show(layout).splitlines()[1]
    assert tile.show(layout).splitlines()[9].split()[:2] == ["0:2", "0:3"]


def test_operands_of_the_tensor_core() -> None:
    a, b = CUDA.a(16, 16, 1), CUDA.b(16, 8, 1)
    for thread, place in product(range(32), range(8)):
        row = thread // 4 + 8 * (place // 2 % 2)
        column = 2 * (thread % 4) + place % 2 + 8 * (place // 4)
        assert a.index(thread, place) == (row, column)
        if place < 4:
            k = 2 * (thread % 4) + place % 2 + 8 * (place // 2)
            assert b.index(thread, place) == (k, thread // 4)


def test_operands_of_the_host() -> None:
    b = HOST.b(16, 16, 1)
    # Even bytes of a lane are the first four along k, odd ones the last four.
    assert [b.index(3, place) for place in range(8)] == [(k, 3) for k in (0, 4, 1, 5, 2, 6, 3, 7)]


def test_shrunk_dimensions_are_replicated() -> None:
    layout = tile.reduce(HOST.c(2, 16, 1), (0,))
    assert layout.shape == (1, 16)
    shrunk = tile.reduce(tile.spatial(4, 2) * tile.local(2, 2), (0,))
    assert shrunk.spatial_modes[0] == -4
    assert (shrunk.num_threads, shrunk.num_local) == (8, 2)
    assert "0,2,.." in tile.show(shrunk) or "0,2,4,6:0" in tile.show(shrunk)


@quick
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.sampled_from([8, 32, 64]))
def test_plain_layouts_use_all_threads(shape: list[int], threads: int) -> None:
    layout = plain(tuple(shape), threads)
    assert layout.num_threads == threads
    assert layout.shape == tuple(shape)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: tile.local(2) * tile.local(2, 2), "dimensions"),
        (lambda: tile.local(0, 2), "at least 1"),
        (lambda: tile.local(4) / tile.local(3), "no layout"),
        (lambda: tile.spatial(4) / tile.local(2), "no layout"),
        (lambda: (tile.local(2) * tile.spatial(2)) / tile.local(2), "no layout"),
        (lambda: TileLayout((4,), (2, 2), (0,), (0, 1)), "named once"),
        (lambda: TileLayout((4, 2), (2, 4), (0,), (1,)), "product"),
        (lambda: tile.replicate(0, 2), "at least 1"),
    ],
)
def test_bad_layouts(made: object, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        made()  # type: ignore[operator]
