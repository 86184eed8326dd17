"""The Qwen2 family.

Source: Yang et al., Qwen2 Technical Report, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.parts import part
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class Qwen2:
    """As Llama, with biases on queries, keys and values."""

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(config, architecture="Qwen2ForCausalLM", model_type="qwen2")
        raw["use_sliding_window"] = False
        raw["sliding_window"] = None
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        common.refuse(raw, "use_sliding_window", (False, None), where)
        return common.read_common(
            raw,
            where,
            defaults={"family": "qwen2", "rms_norm_eps": 1e-6, "max_position": 32768},
            extra={"attention_bias": True},
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        return common.dense_names(config)
