"""Numbers that are not finite never become a checkpoint where the store refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored import META

from shoal.checkpoint import SAVE_MODES, checksum, finite
from shoal.checkpoint.finite import all_finite, finite_part, of_tensors
from shoal.checkpoint.pieces import TORCH_NAMES
from shoal.checkpoint.store import Store

MODES = tuple(SAVE_MODES)


def raw(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_dtype_is_looked_at(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(finite, "native", lambda: None)
    dtype = getattr(torch, TORCH_NAMES[name])
    numbers = torch.linspace(-400, 400, 9000).to(dtype)
    assert all_finite(raw(numbers), name)
    assert all_finite(raw(numbers[:0]), name)
    if not dtype.is_floating_point:
        assert all_finite(raw(torch.full_like(numbers, 1)), name)
        return
    ends = [torch.finfo(dtype).max, torch.finfo(dtype).min]
    largest = torch.tensor(ends, dtype=torch.float64).to(dtype)
    assert all_finite(raw(largest), name)
    for at in (0, 4097, 8999):
        for value in (float("nan"), float("inf"), -float("inf")):
            bad = numbers.clone()
            bad[at] = torch.tensor(value).to(dtype)
            if bad[at].float().isfinite():
                continue  # a type without infinities takes its largest number
            assert not all_finite(raw(bad), name), (at, value)
            size = bad.element_size()
            assert not finite_part(bad, at * size + size - 1, at * size + size)
            assert finite_part(bad, 0, at * size)
            assert of_tensors([("x", bad), ("y", numbers), ("z", bad[::2])]).bad[0] == "x"


def test_other_stores_take_what_they_are_given(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -float("inf")).triu(1)
    Store(tmp_path).save(1, {"mask": mask}, META)
    assert torch.equal(Store(tmp_path).open(1).tensor("mask"), mask)


def test_few_instructions_suffice_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable checksum takes what the native one takes."""
    data = torch.arange(5000, dtype=torch.int32).view(torch.uint8).numpy()
    expected = checksum.crc32c(data)
    monkeypatch.setattr(checksum, "native", lambda: None)
    out = torch.empty(20_000, dtype=torch.uint8).numpy()
    assert checksum.crc32c(data) == expected
    assert checksum.copy_crc32c(out, data) == expected
    assert (out == data).all()
