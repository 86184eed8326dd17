"""Masked-diffusion language models: a Llama whose tokens see all others.

It says what belongs where a mask token stands, for all such places at once, and is decoded from
masks to text in any order (:mod:`shoal.serve.decode.diffusion`).

Source: Sahoo et al., Simple and Effective Masked Diffusion Language Models, 2024; Nie et al.,
Large Language Diffusion Models (LLaDA), 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ModelError
from shoal.core.parts import part
from shoal.model.config import ModelConfig
from shoal.model.families import common


@part
class MaskedDiffusion:
    """A Llama without the causal mask and with a mask token.

    Train one with ``family: mdlm`` in a shape file. Directories are written as
    ``model_type: shoal_mdlm``, which other programs refuse instead of reading them as a model
    that continues text.
    """

    def to_huggingface(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of ``config.json``."""
        raw = common.write_common(
            config, architecture="ShoalForMaskedDiffusion", model_type="shoal_mdlm"
        )
        raw["attention_bias"] = config.attention_bias
        raw["mlp_bias"] = config.ffn_bias
        raw["qk_norm"] = config.qk_norm
        raw["mask_token_id"] = config.mask_token_id
        return raw

    def from_huggingface(self, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """The configuration that ``config.json`` describes.

        Raises:
            ModelError: a value is missing, wrong or not supported.
        """
        if raw.get("mask_token_id") is None:
            raise ModelError(f"{where}: mask_token_id is missing; name the token of a masked place")
        bias = bool(raw.get("attention_bias", False))
        return common.read_common(
            raw,
            where,
            defaults={"family": "mdlm"},
            extra={
                "attention_bias": bias,
                "output_bias": bias,
                "ffn_bias": bool(raw.get("mlp_bias", False)),
                "qk_norm": bool(raw.get("qk_norm", False)),
                "mask_token_id": raw["mask_token_id"],
            },
        )

    def names(self, config: ModelConfig) -> common.Names:
        """Our parameter -> the stored tensors that make it up."""
        return common.dense_names(config)
