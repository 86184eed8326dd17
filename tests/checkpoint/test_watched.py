"""A tensor that changes while it is copied is noticed, whoever changes it and how."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import META

from shoal.checkpoint import SAVE_MODES, checksum, source
from shoal.checkpoint import tensor_snapshot as watched
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import Store
from shoal.checkpoint.tensor_snapshot import TensorSnapshot, digest
from shoal.core.errors import CheckpointError

Write = Callable[[torch.Tensor], Any]


def through_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def through_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int16).numpy()[:] += 1


def by_native_code(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)


def two_pages(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr() + 100_001, 7, 8192)


def one_column(tensor: torch.Tensor) -> None:
    tensor.data.view(-1, 1024)[:, 5] += 1


def saved_while(
    store: Store, live: dict[str, torch.Tensor], mode: Any, write: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch, *, at: int = 0,
) -> Any:  # fmt: skip
    """Save, and write when the copy has come to the chunk ``at``."""
    go, reached = threading.Event(), threading.Event()
    fill = source.ByteSource.fill

    def filled(of: Any, start: int, out: Any) -> None:
        if start >= at and not go.is_set():
            reached.set()
            go.wait(30)
        fill(of, start, out)

    monkeypatch.setattr(source.ByteSource, "fill", filled)
    saver = SAVE_MODES.build(mode).build(store, SinglePeer())
    try:
        ticket = saver.save(1, live, META)
        reached.wait(30)
        write()
        go.set()
        saver.before_update()
    finally:
        saver.close()
    return ticket


@pytest.mark.parametrize("at", [0, 2**19])
@pytest.mark.parametrize(
    "write", [through_data, through_numpy, by_native_code, two_pages, one_column]
)
def test_a_write_that_autograd_does_not_see_drops_the_save(
    write: Write, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("shoal.checkpoint.modes.lazy", "shoal.checkpoint.source"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 2**18)
    weight = torch.nn.Parameter(torch.randn(1600, 1024))  # a column hits 1,600 pages
    version = weight._version
    live = {"model.other": torch.ones(50), "model.weight": weight}
    ticket = saved_while(
        Store(tmp_path), live, "lazy", lambda: write(weight), monkeypatch, at=at
    )  # fmt: skip
    assert weight._version == version, "this is about writes without a version"
    with pytest.raises(CheckpointError, match=r"'model\.weight' was changed while"):
        ticket.wait(30)
    assert Store(tmp_path).steps() == ()


def test_a_full_digest_notices_one_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(512, 1024)

    def write() -> None:
        weight.data[300, 17] += 1

    mode = {"name": "lazy", "watch": "full"}
    ticket = saved_while(Store(tmp_path), {"w": weight}, mode, write, monkeypatch)
    with pytest.raises(CheckpointError, match="'w' was changed while"):
        ticket.wait(30)


@pytest.mark.parametrize("mode", ["lazy", {"name": "lazy", "watch": "full"}])
def test_what_does_not_change_is_saved(mode: Any, tmp_path: Path) -> None:
    live = {
        "turned": torch.randn(300, 200).T,
        "half": torch.randn(70_001).bfloat16(),
        "eighth": torch.randn(90_000).to(torch.float8_e4m3fn),
        "truth": torch.rand(90_000) > 0.5,
        "wide": torch.randn(40_000, dtype=torch.float64),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }
    saver = SAVE_MODES.build(mode).build(Store(tmp_path), SinglePeer())
    saver.save(1, live, META)
    saver.close()
    saved = Store(tmp_path).open(1)
    for name, tensor in live.items():
        assert torch.equal(saved.tensor(name).float(), tensor.float()), name


@pytest.mark.parametrize("native", [True, False])
def test_the_sample_covers_all_dtypes_and_layouts(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(checksum, "native", lambda: None)
    whole = torch.randn(700, 300)
    for tensor in (whole, whole.T, whole[:, 10:290], whole.bfloat16(), whole.double(),
                   whole.to(torch.float8_e5m2), whole > 0, whole.long()):  # fmt: skip
        seen = TensorSnapshot([tensor])
        crc = checksum.crc32c(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        assert not seen.changed(0, crc)
        data = tensor.data
        data.copy_(~data if data.dtype == torch.bool else (data.float() + 1).to(data.dtype))
        assert tensor._version == seen._versions[0]
        assert seen.changed(0, crc), tensor.dtype


def test_places_of_the_sample_differ_from_save_to_save() -> None:
    tensor = torch.zeros(2**20, dtype=torch.uint8)
    tensor[4096 * 9 : 4096 * 9 + 64] = 1
    assert len({digest(tensor, seed) for seed in range(400)}) > 1
    assert digest(tensor, 5) == digest(tensor, 5)
    assert watched.digest(tensor) == checksum.crc32c(tensor.numpy())
