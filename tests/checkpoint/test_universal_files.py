"""The universal form on the disk: whole or absent, verified as it is read, made once."""

from __future__ import annotations

import json
import os

import pytest
import torch
from rank_files import Dumps, config, rank_files, saved, state_of
from stored import flip

from shoal.checkpoint.formats.transfer import transfer
from shoal.checkpoint.universal.atomic import UniversalCheckpoint, UniversalWriter
from shoal.checkpoint.universal.convert import consolidate
from shoal.checkpoint.universal.protocols import Coord, RankLayout, Scalar
from shoal.core.errors import CheckpointError, CorruptError

MODEL = config(tied=True)


@pytest.fixture
def place(tmp_path):
    saved(tmp_path / "store", MODEL)
    return transfer(tmp_path / "store", tmp_path / "u", "universal")


def test_boxes_are_those_of_the_tensor(place):
    result, truth = UniversalCheckpoint(place), state_of(MODEL)
    assert set(result.names()) == set(truth)
    for name, tensor in truth.items():
        assert torch.equal(result.tensor(name), tensor)
    name = "model.blocks.1.mlp.down_proj.weight"
    assert torch.equal(result.tensor(name, (2, 3), (4, 5)), truth[name][2:6, 3:8])
    assert result.step == 7
    assert result.meta["run"] == {"data": "x", "seed": 1}
    with pytest.raises(CheckpointError, match="expected a box of the whole shape"):
        result.tensor(name, (6, 0), (4, 5))
    with pytest.raises(CheckpointError, match=r"holds no tensor 'model\.normal\.weight'"):
        result.tensor("model.normal.weight")
    with pytest.raises(CheckpointError, match="vocab_size = 29 there, 30 here"):
        result.require_model({**MODEL.model_dump(mode="json"), "vocab_size": 30})


def test_only_blocks_that_are_read_are_hashed(tmp_path):
    tensor = torch.arange(4096.0).view(64, 64)
    (tmp_path / "u").mkdir()
    writer = UniversalWriter(tmp_path / "u", block=1024)
    writer.add("w", "fp32", tensor)
    writer.finish(0, {})
    file = tmp_path / "u" / "zero" / "w" / "fp32.safetensors"
    flip(file, file.stat().st_size - 1)
    checkpoint = UniversalCheckpoint(tmp_path / "u")
    assert torch.equal(checkpoint.tensor("model.w", (0, 0), (8, 64)), tensor[:8])
    with pytest.raises(CorruptError, match=r"zero/w/fp32.safetensors: fp32 of w has changed"):
        checkpoint.tensor("model.w", (60, 0), (4, 64))
    assert len(list(UniversalCheckpoint(tmp_path / "u").problems())) == 1


def test_damage_is_named(place):
    file = place / "zero" / "embed.weight" / "exp_avg.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    with pytest.raises(CorruptError, match=r"exp_avg.safetensors: truncated: .* of embed.weight"):
        UniversalCheckpoint(place)
    file.unlink()
    with pytest.raises(CorruptError, match=r"exp_avg of embed\.weight is missing"):
        UniversalCheckpoint(place)
    file.write_bytes(data)
    for name in ("universal.json", "job.json"):
        text = (place / name).read_text()
        (place / name).write_text(text.replace("7", "8", 1))
        with pytest.raises(CorruptError, match=f"{name}: its contents have changed"):
            UniversalCheckpoint(place)
        (place / name).write_text(text)
    table = json.loads((place / "universal.json").read_text())
    (place / "universal.json").write_text(json.dumps({**table, "version": 9}))
    with pytest.raises(CheckpointError, match="version 9"):
        UniversalCheckpoint(place)
    with pytest.raises(CheckpointError, match="no universal checkpoint"):
        UniversalCheckpoint(place / "zero")


def dumps(tmp_path, scale=1.0):
    held = rank_files([("w", "fp32", Coord(), torch.ones(4) * scale)])
    held[Coord()].append(Scalar("w", "step", 5.0))
    return Dumps(tmp_path / "s", RankLayout(), [{"match": ".*", "rule": "unique"}], held)


def test_what_was_put_together_serves_again_while_the_files_are_the_same(tmp_path):
    place = consolidate(dumps(tmp_path))
    assert place == tmp_path / "s.universal"
    first = (place / "universal.json").stat().st_ino
    source = tmp_path / "s" / "rank0"
    state = source.stat()
    again = dumps(tmp_path, 2.0)
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (consolidate(again) / "universal.json").stat().st_ino == first
    os.utime(source, ns=(1, 1))
    consolidate(again)
    assert UniversalCheckpoint(place).tensor("model.w").tolist() == [2.0] * 4
    assert float(UniversalCheckpoint(place).tensor("optimizer.w.step")) == 5.0
    with pytest.raises(CheckpointError, match="exists already"):
        consolidate(dumps(tmp_path, 3.0), out=tmp_path / "s")


def test_ranks_of_different_steps_are_refused(tmp_path):
    source = dumps(tmp_path)
    source.files()[0].held.append(Scalar("w", "step", 6.0))
    with pytest.raises(CheckpointError, match="one rank says step = 5 and another 6"):
        consolidate(source)


def test_names_that_are_no_files_are_refused(tmp_path):
    (tmp_path / "u").mkdir()
    writer = UniversalWriter(tmp_path / "u")
    for name in ("../w", "a/b", "", ".", "..", "a" * 300):
        with pytest.raises(CheckpointError, match="expected a name of letters"):
            writer.add(name, "fp32", torch.ones(2))
    writer.add("w", "fp32", torch.ones(2))
    with pytest.raises(CheckpointError, match="tensors of the parameter's own shape"):
        writer.add("w", "exp_avg", torch.ones(3))
