"""Blocks whose attention and feed-forward layer read the same norm and are added together.

Source: Wang and Komatsuzaki, GPT-J-6B, 2021; Chowdhery et al., PaLM, 2022, section 2; Jiang et
al., MegaScale, 2024, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.parts import part
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class ParallelBlock:
    """Llama with parallel attention and MLP. Train one with ``family: parallel`` in a shape file.

    No Hugging Face class has these blocks with these norms, so directories are written as
    ``model_type: shoal_parallel``, which other programs refuse instead of misreading.
    """

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(
            config, architecture="ShoalParallelForCausalLM", model_type="shoal_parallel"
        )
        raw["attention_bias"] = config.attention_bias
        raw["mlp_bias"] = config.ffn_bias
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        bias = bool(raw.get("attention_bias", False))
        return common.read_common(
            raw,
            where,
            defaults={"family": "parallel"},
            extra={
                "attention_bias": bias,
                "output_bias": bias,
                "ffn_bias": bool(raw.get("mlp_bias", False)),
            },
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        return common.dense_names(config)
