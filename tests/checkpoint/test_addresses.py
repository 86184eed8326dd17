"""Stores at addresses, as ``shoal model`` sees them."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch
from stored import META, tensors
from typer.testing import CliRunner

from shoal.app.commands.model import app
from shoal.checkpoint.convert import convert
from shoal.checkpoint.inspect import find, listing, verify
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ModelError, ShoalError


@pytest.fixture
def place() -> str:
    address = f"memory://{uuid.uuid4().hex}/run"
    for step in (1, 20):
        Store(address).save(step, tensors(step), META)
    return address


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_listed_and_verified(place: str) -> None:
    assert [row.name for row in listing(place)] == list(Store(place).open(20).names())
    assert "3 tensors" in call("ls", place)
    assert {row["name"] for row in json.loads(call("ls", place, "-o", "json"))} == set(tensors())
    assert "valid run: 6 tensors" in call("verify", place)
    assert find(f"{place}/step-00000020").steps == (20,)
    assert verify(f"{place}/step-00000020").tensors == 3


def test_a_flipped_bit_is_found(place: str) -> None:
    fs = Store(place).storage._fs  # type: ignore[attr-defined]
    (file,) = [
        f
        for f in fs.find("")
        if "step-00000001." in f and f.endswith("safetensors") and place.split("/")[2] in f
    ]
    raw = bytearray(fs.cat_file(file))
    raw[-1] ^= 1
    fs.pipe_file(file, bytes(raw))
    result = verify(place)
    assert not result.ok and "step-00000001" in result.problems[0]
    assert CliRunner().invoke(app, ["verify", place]).exception is not None


def test_it_is_converted_there_and_back(place: str, tmp_path: Path) -> None:
    call("convert", place, str(tmp_path / "here"), "--to", "checkpoint")
    there = f"memory://{uuid.uuid4().hex}"
    call("convert", str(tmp_path / "here"), there, "--to", "checkpoint")
    for name, tensor in tensors(20).items():
        assert torch.equal(Store(there).open(20).tensor(name), tensor)
    assert "0 of them differ" in call("diff", place, there)
    assert "0 of them differ" in call("diff", str(tmp_path / "here"), f"{there}/step-00000020")
    assert CliRunner().invoke(app, ["diff", place, f"{place}/step-00000001"]).exit_code == 1


def test_refusals(place: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no checkpoint"):
        find(f"memory://{uuid.uuid4().hex}")
    with pytest.raises(ModelError, match="holds no checkpoint"):
        find(f"{place}/step-00000007")
    with pytest.raises(ModelError, match="only checkpoints lie at addresses"):
        convert(place, "memory://elsewhere", to="huggingface")
    with pytest.raises(ModelError, match="holds checkpoints already"):
        convert(place, place, to="checkpoint")
    with pytest.raises(ShoalError, match="nosuch"):
        listing("nosuch://place")
    with pytest.raises((CheckpointError, ModelError), match="only checkpoints lie"):
        CliRunner().invoke(
            app, ["convert", place, "memory://e", "--to", "dcp"], catch_exceptions=False
        )
