"""Fresh weights depend on seed and name alone."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from shoal.model.initialise import empty, init_weights, initial  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402


def test_meta_and_real_agree(config):
    real, meta = Transformer(config), empty(config)
    assert all(p.is_meta for p in meta.parameters())
    init_weights(real, 7)
    init_weights(meta, 7)
    for (name, a), b in zip(real.named_parameters(), meta.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a.flatten(), initial(config, name, 7)), name
    init_weights(real, 8)
    assert not torch.equal(real.embed.weight, meta.embed.weight)


def test_scale(config):
    model = Transformer(config)
    init_weights(model, 0)
    std = config.initializer_range
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith(".bias"):
            assert (parameter == 0).all()
        else:
            residual = "o_proj" in name or "down_proj" in name
            expected = std / math.sqrt(2 * config.num_layers) if residual else std
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
            assert abs(parameter.mean().item()) < expected / 3


def test_fused_matrices_are_not_one_stream(config):
    model = empty(config)
    init_weights(model, 0)
    fused = model.blocks[0].attention.qkv_proj.weight
    narrow = config.model_copy(update={"num_heads": config.num_heads // 2})
    smaller = empty(narrow)
    init_weights(smaller, 0)
    rows = 2 * config.num_kv_heads * config.head_dim
    other = smaller.blocks[0].attention.qkv_proj.weight
    assert torch.equal(fused[-rows:], other[-rows:])
