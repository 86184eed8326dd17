"""What was written is read from the disk again, chunk by chunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stored import META, flip, save_on_ranks, split, tensors

from shoal.checkpoint import readback
from shoal.checkpoint.store import Store
from shoal.core.errors import CorruptError


@pytest.mark.parametrize("chunk", [4096, 2**23])
def test_every_flipped_byte_is_found_and_named(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readback, "CHUNK_BYTES", chunk)
    whole = torch.randn(60, 70)
    pieces = split(whole, 0, 2)
    store = Store(tmp_path)
    rest = {"empty": torch.empty(0, 2), **tensors(1)}
    save_on_ranks(store, 1, [{"w": pieces[0], **rest}, {"w": pieces[1]}])
    store.open(1).read_back()
    for path in (tmp_path / "step-00000001").glob("rank-*.safetensors"):
        saved = store.open(1)
        first = min(start for _, _, start in saved.index.shard(path.name).pieces())
        for position in range(first, path.stat().st_size, 977):
            flip(path, position, 4)
            with pytest.raises(CorruptError, match=rf"tensor '[\w.]+' in .*{path.name}"):
                saved.read_back()
            flip(path, position, 4)
        saved.read_back()


def test_a_file_that_ends_early_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    saved = store.open(1)
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="have changed"):
        saved.read_back()
