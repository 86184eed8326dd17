"""Configurations and shapes."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError, ModelError
from shoal.ir.shape import ModelShape
from shoal.model import FAMILIES
from shoal.model.config import ModelConfig, RopeScaling

SHAPE = {
    "name": "x",
    "num_layers": 2,
    "hidden": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden": 96,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("extra", "family"),
    [
        ({}, "llama"),
        ({"attention_bias": True}, "qwen2"),
        ({"qk_norm": True, "tied": True}, "qwen3"),
        ({"num_experts": 4, "top_k": 2, "expert_hidden": 48}, "mixtral"),
    ],
)
def test_shape_and_back(extra, family):
    shape = ModelShape(**SHAPE, **extra)
    config = ModelConfig.from_shape(shape)
    assert config.family == family
    assert ModelConfig.from_shape(config.shape()) == config
    for key in ("num_layers", "hidden", "num_kv_heads", "tied", "num_experts", "expert_hidden"):
        assert getattr(config.shape(), key) == getattr(shape, key)


def test_parameters_are_those_of_the_shape(config):
    from shoal.cost.arithmetic import parameters
    from shoal.model.initialise import empty

    built = sum(p.numel() for p in empty(config).parameters())
    stored = FAMILIES.build(config.family).names(config)
    assert built == sum(piece.numel for pieces in stored.values() for piece in pieces)
    if not (config.output_bias or config.ffn_bias):
        assert parameters(config.shape()) == built


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"gated": False}, "not gated"),
        ({"num_experts": 4, "top_k": 1, "num_shared_experts": 1}, "shared experts"),
        ({"num_experts": 4, "top_k": 1, "qk_norm": True}, "experts together with QK norm"),
        ({"attention": "MLA"}, "its attention is MLA"),
    ],
)
def test_shapes_that_cannot_be_built(extra, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_shape(ModelShape(**SHAPE, **extra))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads = 3: expected a divisor"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"family": "mixtral"}, "num_experts"),
        ({"qk_norm": True}, "qk_norm"),
        ({"top_k": 2}, "top_k"),
    ],
)
def test_impossible_configurations(change, message):
    base = {key: SHAPE[key] for key in SHAPE}
    with pytest.raises((ModelError, ConfigError), match=message):
        ModelConfig(**{**base, **change})


def test_impossible_scaling():
    with pytest.raises(ModelError, match="original_max_position_embeddings"):
        RopeScaling(rope_type="llama3", factor=8.0)


def test_yaml_round_trip(config, tmp_path):
    config.save(tmp_path / "model.yaml")
    assert ModelConfig.load(tmp_path / "model.yaml") == config
