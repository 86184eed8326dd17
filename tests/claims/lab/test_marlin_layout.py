"""The GPU layout: a bijection with the published order of codes and scales."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.claims.lab import marlin_layout as layout
from shoal.core.errors import KernelError
from shoal.core.random import generator


@pytest.mark.parametrize(("k", "n"), [(16, 64), (48, 64), (32, 192), (128, 256)])
def test_unpack_inverts_pack(k: int, n: int) -> None:
    codes = generator(k, purpose="codes").integers(0, 16, (k, n)).astype(np.uint8)
    words = layout.pack(codes)
    assert words.shape == (k // 16, 2 * n)
    assert words.dtype == np.int32
    assert (layout.unpack(words) == codes).all()
    assert (layout.pack(layout.unpack(words)) == words).all()


def test_orders_are_permutations() -> None:
    assert sorted(layout.CODE_ORDER) == list(range(1024))
    assert sorted(layout.SCALE_ORDER) == list(range(64))
    assert sorted(layout.SCALE_ORDER_CHANNEL) == list(range(32))


def test_places_are_those_of_the_tensor_core() -> None:
    """Word by word, from the sentences that define the layout."""
    k, n = 32, 128
    number = np.arange(k * n).reshape(k, n)
    where = {}
    for bit in range(0, 12, 4):
        words = layout.pack((number >> bit & 15).astype(np.uint8)).view(np.uint32)
        for place in range(8):
            where[bit, place] = words >> (4 * place) & 15
    for tile_row in range(k // 16):
        for run in range(n // 64):
            for thread in (0, 1, 5, 18, 31):
                for tile in range(4):
                    owned = [
                        (2 * (thread % 4) + row, thread // 4 + column)
                        for column in (0, 8)
                        for row in (0, 1, 8, 9)
                    ]
                    word = run * 128 + thread * 4 + tile
                    for place, index in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                        row, column = owned[index]
                        code = sum(int(where[b, place][tile_row, word]) << b for b in (0, 4, 8))
                        at = number[16 * tile_row + row, 64 * run + 16 * tile + column]
                        assert code == at


@pytest.mark.parametrize(("groups", "n"), [(1, 32), (1, 96), (4, 64), (3, 256)])
def test_scales_are_restored(groups: int, n: int) -> None:
    scales = generator(n, purpose="scales").random((groups, n)).astype(np.float16)
    ordered = layout.order_scales(scales)
    assert (layout.restore_scales(ordered) == scales).all()
    first = [0, 8, 16, 24, 32] if groups > 1 else [0, 1, 8, 9, 16]
    assert (ordered[0, :5] == scales[0, first]).all()


def test_bad_shapes_name_the_nearest() -> None:
    with pytest.raises(KernelError, match=r"codes of \[17, 64\].*nearest \[32, 64\]"):
        layout.pack(np.zeros((17, 64), np.uint8))
    with pytest.raises(KernelError, match=r"codes of \[16, 100\].*nearest \[16, 128\]"):
        layout.pack(np.zeros((16, 100), np.uint8))
    with pytest.raises(KernelError, match="uint8 of 0 to 15"):
        layout.pack(np.full((16, 64), 16, np.uint8))
    with pytest.raises(KernelError, match=r"words of \[2, 100\]"):
        layout.unpack(np.zeros((2, 100), np.int32))
    with pytest.raises(KernelError, match="expected int32"):
        layout.unpack(np.zeros((2, 128), np.int64))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"scales of \[2, 32\].*nearest \[2, 64\]"):
        layout.order_scales(np.zeros((2, 32), np.float16))
