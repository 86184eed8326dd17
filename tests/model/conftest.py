"""Tiny models of every family, and one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from shoal.model.config import ModelConfig, RopeScaling  # noqa: E402

# The tests of this room share a module that is no test.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


BASE = {
    "vocab_size": 128,
    "hidden": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden": 96,
    "max_position": 128,
    "initializer_range": 0.15,
}

CONFIGS = {
    "llama": ModelConfig(**BASE, family="llama", tied=True),
    "llama-bias": ModelConfig(
        **BASE, family="llama", attention_bias=True, output_bias=True, ffn_bias=True
    ),
    "llama3-rope": ModelConfig(
        **BASE,
        family="llama",
        rope_scaling=RopeScaling(
            rope_type="llama3", factor=8.0, original_max_position_embeddings=32
        ),
    ),
    "qwen2": ModelConfig(**BASE, family="qwen2", attention_bias=True, tied=True),
    "qwen3": ModelConfig(**{**BASE, "head_dim": 32}, family="qwen3", qk_norm=True),
    "mixtral": ModelConfig(**BASE, family="mixtral", num_experts=4, top_k=2, rope_theta=1e6),
}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def random_model(config: ModelConfig, seed: int = 0, dtype=None):
    """A model in which every parameter is random, norms and biases too."""
    from shoal.model.transformer import Transformer

    model = Transformer(config)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, config.initializer_range, generator=source)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model if dtype is None else model.to(dtype)


@pytest.fixture
def make():
    return random_model
