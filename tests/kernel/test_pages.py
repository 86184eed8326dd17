"""Memory in large pages: what is gone serves the next, and tensors in it are as any others."""

from __future__ import annotations

import mmap

import pytest
import torch

from shoal.kernel import pages

_MANY = (3, 1 << 18)  # 3 MiB of fp32
kept = pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="no pages to be had back")


@kept
def test_memory_that_is_gone_serves_the_next() -> None:
    pages._GONE.clear()
    first = pages.empty(_MANY, torch.float32).fill_(1)
    second = pages.empty(_MANY, torch.float32).fill_(2)
    part, place = first[1, 5:9], second.data_ptr()
    del first, second
    # A part of it is still there.
    assert len(pages._GONE) == 1
    third = pages.empty((3 << 18,), torch.int32)
    assert third.data_ptr() == place
    assert not pages._GONE
    third.fill_(3)
    assert part.tolist() == [1, 1, 1, 1]
    # Another size is other memory.
    del part
    assert pages.empty((9, 1 << 18), torch.float32).data_ptr() % 64 == 0
    assert len(pages._GONE) == 2


@kept
def test_only_so_much_is_kept() -> None:
    pages._GONE.clear()
    many = [pages.empty((1 << 19,), torch.float32) for _ in range(10)]
    del many
    assert len(pages._GONE) == pages._GONE.maxlen
    pages._GONE.clear()


@pytest.mark.parametrize("shape", [(0, 3), (5, 7), _MANY])
def test_a_tensor_is_no_view(shape: tuple[int, ...]) -> None:
    array = pages.empty(shape, torch.float32)
    assert array.shape == shape and array.is_contiguous() and array._base is None
    assert array.untyped_storage().nbytes() == array.numel() * 4
    array.fill_(2)
    assert float(array.sum()) == 2 * array.numel()


@pytest.mark.parametrize(
    ("nbytes", "large"),
    [
        (100, 0),
        (1 << 20, 0),
        (2 << 20, 2 << 20),
        ((2 << 20) + 4096, 2 << 20),
        (1024 * 2816 * 2, 6 << 20),
        (5632 * 1024 * 2, 12 << 20),
        (9 << 20, 10 << 20),
        (5 << 20, 4 << 20),
    ],
)
def test_large_pages_are_filled_but_for_a_little(nbytes: int, large: int) -> None:
    assert pages.large_bytes(nbytes) == large
    room = pages.room(nbytes)
    assert len(room) == nbytes
    assert room.data_ptr() % ((2 << 20) if large else 64) == 0
    assert room.untyped_storage().nbytes() >= max(nbytes, large)
