"""Models of every family that kernels compute: all that a norm, a rope or a product may meet."""

from __future__ import annotations

from typing import Any

from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"family": "qwen2", "attention_bias": True, "tied": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "mixtral": {"family": "mixtral", "num_experts": 4, "top_k": 2},
    "parallel": {"family": "parallel"},
}


def model(family: str) -> Transformer:
    """A model of two layers, fp32, that may be trained."""
    config = ModelConfig(
        vocab_size=97,
        hidden=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden=72,
        max_position=64,
        initializer_range=0.2,
        **FAMILIES[family],
    )
    made = Transformer(config)
    init_weights(made, seed=1)
    return made
