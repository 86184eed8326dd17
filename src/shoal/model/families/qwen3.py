"""The Qwen3 family.

Source: Yang et al., Qwen3 Technical Report, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.parts import part
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class Qwen3:
    """As Llama, with RMS norm on every head of queries and keys."""

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(config, architecture="Qwen3ForCausalLM", model_type="qwen3")
        raw["attention_bias"] = config.attention_bias
        raw["use_sliding_window"] = False
        raw["sliding_window"] = None
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        common.refuse(raw, "use_sliding_window", (False, None), where)
        bias = bool(raw.get("attention_bias", False))
        return common.read_common(
            raw,
            where,
            defaults={
                "family": "qwen3",
                "rms_norm_eps": 1e-6,
                "max_position": 32768,
                "head_dim": 128,
            },
            extra={"qk_norm": True, "attention_bias": bias, "output_bias": bias},
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        return common.dense_names(config)
