"""The Mixtral family.

Source: Jiang et al., Mixtral of Experts, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.parts import part, table
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class Mixtral:
    """As Llama, with a mixture of experts; top-k routing."""

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(config, architecture="MixtralForCausalLM", model_type="mixtral")
        raw["num_local_experts"] = config.num_experts
        raw["num_experts_per_tok"] = config.top_k
        raw["sliding_window"] = None
        raw["router_jitter_noise"] = 0.0
        raw["output_router_logits"] = False
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        common.refuse(raw, "sliding_window", (None,), where)
        return common.read_common(
            raw,
            where,
            defaults={"family": "mixtral", "rope_theta": 1e6, "max_position": 131072},
            extra={
                "num_experts": raw.get("num_local_experts", 8),
                "top_k": raw.get("num_experts_per_tok", 2),
                "norm_topk_prob": True,
            },
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        names = common.attention_names(config)
        dim, width = config.hidden, config.ffn_hidden
        gate = table("gate").build(config.architecture.moe.gate)
        for layer in range(config.num_layers):
            own = f"blocks.{layer}.mlp"
            theirs = f"model.layers.{layer}.block_sparse_moe"
            for name, shape in gate.shapes(dim, config.num_experts).items():
                stored = name.replace("router", "gate", 1)
                names[f"{own}.{name}"] = (common.ParameterPiece(f"{theirs}.{stored}", shape),)
            names[f"{own}.gate_up_proj"] = tuple(
                common.ParameterPiece(f"{theirs}.experts.{expert}.{matrix}.weight", (width, dim))
                for expert in range(config.num_experts)
                for matrix in ("w1", "w3")
            )
            names[f"{own}.down_proj"] = tuple(
                common.ParameterPiece(f"{theirs}.experts.{expert}.w2.weight", (dim, width))
                for expert in range(config.num_experts)
            )
        return names
