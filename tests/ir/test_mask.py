"""Every mask equals its definition cell by cell; counts are exact; bad ranges are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.ir.mask import BlockMap, Mask, MaskRange

T = 24
IDS = np.array([0] * 5 + [1] * 9 + [2] + [3] * 9)
PIECES = np.array([7] * 3 + [1] * 6 + [7] * 9 + [-1] * 6)  # one document in two pieces, padding


def _cells(see: Callable[[int, int], bool], length: int = T) -> np.ndarray:
    return np.array([[see(q, k) for k in range(length)] for q in range(length)])


def _shared_question(q: int, k: int) -> bool:
    # Two documents: question 4, answers 3 and 5; question 6, answers 2 and 4.
    part = [0] * 4 + [1] * 3 + [2] * 5 + [3] * 6 + [4] * 2 + [5] * 4
    return k <= q and (part[q] == part[k] or (part[k] == 0 and q < 12) or part[k] == 3)


def _window(window: int, causal: bool, first: int) -> np.ndarray:
    def see(q: int, k: int) -> bool:
        return (abs(q - k) < window or q < first or k < first) and (k <= q or not causal)

    return _cells(see)


CASES: dict[str, tuple[Mask, np.ndarray]] = {
    "full": (Mask.full(T), _cells(lambda q, k: True)),
    "causal": (Mask.causal(T), _cells(lambda q, k: k <= q)),
    "document": (
        Mask.document(IDS, causal=False),
        _cells(lambda q, k: bool(IDS[q] == IDS[k])),
    ),
    "causal_document": (
        Mask.document(IDS),
        _cells(lambda q, k: bool(k <= q and IDS[q] == IDS[k])),
    ),
    "pieces": (
        Mask.document(PIECES),
        _cells(lambda q, k: bool(k <= q and PIECES[q] == PIECES[k] >= 0)),
    ),
    "full_pieces": (
        Mask.document(PIECES, causal=False),
        _cells(lambda q, k: bool(PIECES[q] == PIECES[k] >= 0)),
    ),
    "padded": (Mask.padded(T, 17), _cells(lambda q, k: k <= q < 17)),
    "empty": (Mask.padded(T, 0), _cells(lambda q, k: False)),
    "prefix": (Mask.prefix(T, 7), _cells(lambda q, k: k <= q or k < 7)),
    "prefix_all": (Mask.prefix(T, T), _cells(lambda q, k: True)),
    "shared_question": (Mask.shared_question([[4, 3, 5], [6, 2, 4]]), _cells(_shared_question)),
    "block_causal": (Mask.block_causal(T, 6), _cells(lambda q, k: k // 6 <= q // 6)),
    "causal_blockwise": (
        Mask.causal_blockwise([6, 6, 6, 6]),
        _cells(lambda q, k: k <= q and (k // 6 == q // 6 or q >= 18)),
    ),
}
for _size in (1, 2, 5, 12, 13, 20, 30):
    for _causal in (True, False):
        for _first in (0, 1, 5, T):
            CASES[f"global_{_size}_{_causal}_{_first}"] = (
                Mask.global_sliding(T, _size, _first, causal=_causal),
                _window(_size, _causal, _first),
            )
        CASES[f"sliding_{_size}_{_causal}"] = (
            Mask.sliding(T, _size, causal=_causal),
            _window(_size, _causal, 0),
        )


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_its_definition(name: str) -> None:
    mask, cells = CASES[name]
    assert np.array_equal(mask.dense(), cells)
    assert mask.area() == cells.sum()


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_mask_is_that_part(name: str) -> None:
    mask, cells = CASES[name]
    rng = np.random.default_rng(3)
    for size in (0, 1, 7, 16):
        queries, keys = rng.permutation(T)[:size], rng.permutation(T)[: size + 2]
        part = cells[np.ix_(queries, keys)]
        assert np.array_equal(mask.dense(queries, keys), part)
        assert mask.area(queries, keys) == part.sum()
        if size:
            kinds = {(True, True): "everything", (True, False): "mixed", (False, False): "nothing"}
            assert mask.kind(queries, keys) == kinds[bool(part.any()), bool(part.all())]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ranges_of_any_kind(data: st.DataObject) -> None:
    q0, q1 = sorted(data.draw(st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True)))
    k0, k1 = sorted(data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True)))
    kind: Any = data.draw(st.sampled_from(["full", "causal", "inv_causal", "bicausal"]))
    dense = Mask(12, 9, (MaskRange(q0, q1, k0, k1, cast(Any, kind)),)).dense()
    for q in range(12):
        for k in range(9):
            see = q0 <= q < q1 and k0 <= k < k1
            see = see and (kind in ("full", "inv_causal") or k - q <= k1 - q1)
            see = see and (kind in ("full", "causal") or k - q >= k0 - q0)
            assert dense[q, k] == see


@pytest.mark.parametrize("density", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_random_blocks_have_their_density(density: float) -> None:
    mask = Mask.random_blocks(T, 4, density, seed=1)
    cells = mask.dense()
    assert mask.area() == cells.sum() == round(density * 36) * 16
    blocks = cells.reshape(6, 4, 6, 4)
    assert np.array_equal(blocks.any((1, 3)), blocks.all((1, 3)))
    assert mask == Mask.random_blocks(T, 4, density, seed=1)
    if 0 < density < 1:
        assert mask != Mask.random_blocks(T, 4, density, seed=2)
    scattered = np.array([3, 17, 4, 9])
    assert np.array_equal(mask.dense(scattered, scattered), cells[np.ix_(scattered, scattered)])
    assert mask.area(scattered) == cells[scattered].sum()


def test_ranges_and_maps_stand_together() -> None:
    seen = np.packbits(np.array([[True, False], [False, True]])).tobytes()
    mask = Mask(8, 8, (MaskRange(0, 4, 0, 4, "causal"),), (BlockMap(4, 8, 4, 8, 2, seen),))
    cells = np.zeros((8, 8), dtype=bool)
    cells[:4, :4] = np.tril(np.ones((4, 4)))
    cells[4:6, 4:6] = cells[6:, 6:] = True
    assert np.array_equal(mask.dense(), cells)
    assert mask.area() == cells.sum() == 18
    assert hash(mask) == hash(Mask(8, 8, mask.ranges, mask.blocks))


def test_disjoint_cells_of_meeting_rectangles_are_allowed() -> None:
    mask = Mask(4, 4, (MaskRange(0, 4, 0, 4, "causal"), MaskRange(0, 3, 1, 4, "inv_causal")))
    assert mask.dense().all()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Mask(8, 8, (MaskRange(0, 4, 0, 8), MaskRange(3, 8, 7, 8))), "do not overlap"),
        (lambda: Mask(8, 8, (MaskRange(0, 4, 0, 9),)), r"inside \[8, 8\]"),
        (lambda: Mask(8, 8, (MaskRange(4, 4, 0, 8),)), "rising"),
        (
            lambda: Mask(8, 8, (MaskRange(0, 4, 0, 4, cast(Any, "diagonal")),)),
            "one of full, causal",
        ),
        (lambda: Mask(0, 8), "at least 1"),
        (lambda: Mask(8, 8, (MaskRange(0, 2, 0, 2),), (BlockMap(0, 8, 0, 8, 4, b"0"),)), "overlap"),
        (lambda: Mask(8, 8, (), (BlockMap(0, 6, 0, 8, 4, b"0"),)), "multiple of the block of 4"),
        (lambda: Mask(8, 8, (), (BlockMap(0, 8, 0, 8, 1, b"0"),)), "8 bytes"),
        (lambda: Mask.block_causal(10, 4), "use 8 or 12"),
        (lambda: Mask.random_blocks(10, 4, 0.5, 0), "use 8 or 12"),
        (lambda: Mask.random_blocks(8, 4, 1.5, 0), "0 to 1"),
        (lambda: Mask.document(np.zeros((2, 3), dtype=int)), r"integers \[T\]"),
        (lambda: Mask.document(np.zeros(3)), r"integers \[T\]"),
        (lambda: Mask.sliding(8, 0), "at least 1"),
        (lambda: Mask.prefix(8, 9), "0 to 8"),
        (lambda: Mask.padded(8, 9), "0 to 8"),
        (lambda: Mask.global_sliding(8, 2, 9), "0 to 8"),
        (lambda: Mask.shared_question([[3, 0]]), "each at least 1"),
        (lambda: Mask.shared_question([]), "a document or more"),
        (lambda: Mask.causal_blockwise([]), "one or more lengths"),
        (lambda: Mask.block_sparse(np.ones((2, 2)), 4), "bool"),
        (lambda: Mask.causal(8).dense(np.array([0, 8])), "0 to 7"),
    ],
)
def test_a_wrong_mask_is_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()
