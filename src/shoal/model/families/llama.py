"""The Llama family.

Source: Touvron et al., LLaMA, 2023; Dubey et al., The Llama 3 Herd of Models, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.parts import part
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class Llama:
    """Grouped-query attention and SwiGLU; Mistral without a sliding window is the same."""

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(config, architecture="LlamaForCausalLM", model_type="llama")
        raw["attention_bias"] = config.attention_bias
        raw["mlp_bias"] = config.ffn_bias
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        common.refuse(raw, "sliding_window", (None,), where)
        bias = bool(raw.get("attention_bias", False))
        return common.read_common(
            raw,
            where,
            defaults={"family": "llama", "rms_norm_eps": 1e-6},
            extra={
                "attention_bias": bias,
                "output_bias": bias,
                "ffn_bias": bool(raw.get("mlp_bias", False)),
            },
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        return common.dense_names(config)
