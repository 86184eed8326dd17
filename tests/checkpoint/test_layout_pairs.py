"""Saved under any layout, loaded under any other: bit-equal, and every byte read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import checkpoint
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.store import Store
from shoal.core.boxes import Box
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.ir.comm import Comm
from shoal.model.config import ModelConfig
from shoal.parallel.check import Fresh, tokens
from shoal.parallel.engine import Engine, Rows
from shoal.parallel.legal import check_split
from shoal.parallel.thread_comm import run_ranks
from shoal.train.loop import fill, held_by
from shoal.train.reshard import Blank

CONFIG = ModelConfig(
    family="llama",
    vocab_size=29,
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden=24,
    max_position=32,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"parallel": {}},
    "flat buffers cut anywhere, three ranks": {"parallel": {"dp": 3}, "shard": "zero1"},
    "sharded parameters, two ranks": {"parallel": {"dp": 2}, "shard": "zero3"},
    "tensor parallel": {"parallel": {"tp": 2}},
    "pipeline": {"parallel": {"pp": 2}},
    "data and tensor parallel, sharded": {"parallel": {"dp": 2, "tp": 2}, "shard": "zero3"},
}


def job(layout: str) -> TrainJob:
    common = {
        "model": "shoal-0.3m",
        "seq_len": 8,
        "global_batch": 6,
        "microbatch": 1,
        "precision": "fp32",
        "steps": 2,
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    return TrainJob.model_validate({**common, **LAYOUTS[layout]})


def built(comm: Comm, layout: str, weights: Any) -> tuple[Engine, Any]:
    split = job(layout)
    engine = Engine(split, check_split(split, CONFIG.shape()), weights, comm)
    return engine, table("optimizer").build(split.optimizer).build(engine.sharded.owned())


def trained(comm: Comm, layout: str) -> dict[str, list[Piece]]:
    """Everything that a rank holds after one step."""
    engine, updater = built(comm, layout, Fresh(CONFIG))
    split = job(layout)
    every = tokens(split, CONFIG.vocab_size, 0, documents=False)
    share = len(every.inputs) // engine.replicas
    own = slice(engine.replica * share, (engine.replica + 1) * share)
    rows = Rows(every.inputs[own], every.targets[own], None, own.start, 0)
    engine.backward(rows, split.microbatch, split.global_batch * split.seq_len)
    engine.finish()
    updater.step(1.0)
    engine.sharded.publish()
    return held_by(engine, updater)


class Held:
    """What a rank holds, as a source."""

    def __init__(self, pieces: dict[str, list[Piece]]) -> None:
        self.pieces = pieces

    def shards(self) -> Any:
        return self.pieces

    def plain(self) -> None: ...

    def wanted(self, stored: Any) -> Any:
        return self.pieces

    def loaded(self, plain: Any) -> None: ...


def equal(pieces: dict[str, list[Piece]], whole: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(p.tensor, whole[name][p.box.slices(Box.whole(tuple(whole[name].shape)))])
        for name, several in pieces.items()
        for p in several
    )


@pytest.mark.slow
def test_six_layouts_by_six(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    irregular = 0
    for saving in LAYOUTS:
        place = tmp_path / saving

        def save(comm: Comm, place: Path = place, saving: str = saving) -> Any:
            pieces = trained(comm, saving)
            checkpoint.save(place, Held(pieces), comm=comm)
            return pieces

        world = job(saving).parallel.world
        held = run_ranks(world, save)
        saved = Store(place).open(0)
        whole = {name: saved.tensor(name) for name in saved.names()}
        assert any(name.startswith("optimizer.") for name in whole)
        assert all(equal(pieces, whole) for pieces in held)
        irregular += sum(len(several) > 1 for pieces in held for several in pieces.values())
        size = sum(p.bytes for t in saved.index.tensors.values() for p in t.pieces)
        assert size == sum(tensor.nbytes for tensor in whole.values())  # copies are stored once
        for loading in LAYOUTS:

            def load(
                comm: Comm, place: Path = place, loading: str = loading, whole: Any = whole
            ) -> int:
                engine, updater = built(comm, loading, Blank(CONFIG))
                report = fill(engine, updater, Store(place).open(0, verify=False), comm)
                pieces = held_by(engine, updater)
                assert set(pieces) <= set(whole) and equal(pieces, whole)
                assert report is not None
                return report.read_bytes

            read = run_ranks(job(loading).parallel.world, load)
            assert sum(read) == size, (saving, loading)
    assert irregular > 10
    torch.set_num_threads(threads)
