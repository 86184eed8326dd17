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
        index = Store(tmp_path / saving).open(0, verify=False).index
        size = sum(piece.bytes for t in index.tensors.values() for piece in t.pieces)
        # Copies are stored once.
        assert size == sum(tensor.nbytes for tensor in whole.values())
        irregular += sum(
            piece.shape[1:] != tensor.shape[1:] and len(tensor.pieces) > 2
            for tensor in index.tensors.values()
            for piece in tensor.pieces
        )
        for loading in LAYOUTS:
            assert layout_pair(tmp_path / saving, loading, whole) == (True, size), (saving, loading)
            alone = layout_pair(tmp_path / saving, loading, whole, by_file=True)[0]
            assert not alone or saving == loading
    assert irregular > 10
    torch.set_num_threads(threads)
