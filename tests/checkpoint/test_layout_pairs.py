"""Saved under any layout, loaded under any other: bit-equal, and every byte read once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.store import Store
from shoal.claims.experiments.bytecheckpoint_load import LAYOUTS, layout_pair, saved_under


@pytest.mark.slow
def test_six_layouts_by_six(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    irregular = 0
    for saving in LAYOUTS:
        whole = saved_under(tmp_path / saving, saving)
        assert any(name.startswith("all.optimizer.") for name in whole)
        saved = Store(tmp_path / saving).open(0, verify=False)
        pieces = {name: saved.pieces(name) for name in saved.index.tensors}
        size = sum(piece.bytes for own in pieces.values() for piece in own)
        # Copies are stored once.
        assert size == sum(tensor.nbytes for tensor in whole.values())
        irregular += sum(
            piece.shape[1:] != saved.index.tensors[name].shape[1:] and len(own) > 2
            for name, own in pieces.items()
            for piece in own
        )
        for loading in LAYOUTS:
            assert layout_pair(tmp_path / saving, loading, whole) == (True, size), (saving, loading)
            alone = layout_pair(tmp_path / saving, loading, whole, by_file=True)[0]
            assert not alone or saving == loading
    assert irregular > 10
    torch.set_num_threads(threads)
