"""Listing, verifying and converting models of few bits and GGUF files."""

from __future__ import annotations

import struct

import pytest

torch = pytest.importorskip("torch")

from shoal.checkpoint.convert import convert  # noqa: E402
from shoal.checkpoint.inspect import find, listing, verify  # noqa: E402
from shoal.core.errors import ModelError  # noqa: E402
from shoal.kernel.formats import weight_format  # noqa: E402
from shoal.model import QUANTIZERS, huggingface  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.initialise import init_weights  # noqa: E402
from shoal.model.quantize.blocks import quantize  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=64,
    max_position=32,
    tied=True,
)


def test_packed_directories(tmp_path):
    model = Transformer(CONFIG)
    init_weights(model, 0)
    made = quantize(model, weight_format("int4-g32"), QUANTIZERS.build("rtn"))
    state = {name: p.detach() for name, p in model.named_parameters()}
    huggingface.write_state(tmp_path / "m", CONFIG, state, packed=made.packed)
    rows = {row.name: row for row in listing(tmp_path / "m")}
    assert rows["model.layers.0.mlp.down_proj.codes"].shape == (32, 32)
    assert verify(tmp_path / "m").ok
    convert(tmp_path / "m", tmp_path / "plain")
    plain = huggingface.read(tmp_path / "plain")
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    convert(tmp_path / "m", tmp_path / "store", to="checkpoint")
    assert find(tmp_path / "store").kind == "run"


def test_gguf_files(tmp_path):
    file = tmp_path / "m.gguf"
    raw = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    raw += struct.pack("<Q", 1) + b"x" + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    raw += b"\0" * (-len(raw) % 32) + b"\0" * 32
    file.write_bytes(raw)
    assert find(file).kind == "gguf"
    (row,) = listing(file)
    assert (row.name, row.dtype, row.shape, row.bytes) == ("x", "F32", (2, 4), 32)
    assert verify(file).ok
    with pytest.raises(ModelError, match=r"general\.architecture"):
        convert(file, tmp_path / "out")
    file.write_bytes(raw[:-1])
    assert "claims 8 elements" in verify(file).problems[0]
    with pytest.raises(ModelError, match="no such directory"):
        find(tmp_path / "other.gguf")
