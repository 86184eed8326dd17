"""What the families have in common: most keys of ``config.json`` and most tensor names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.core.errors import ModelError
from shoal.core.parts import explain
from shoal.model.config import ModelConfig


@dataclass(frozen=True)
class ParameterPiece:
    """A stored tensor that is a run of one of our parameters.

    The elements of a parameter, in memory order, are those of its pieces one after the
    other; so a fused matrix is its parts below each other.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Names = dict[str, tuple[ParameterPiece, ...]]

# Hugging Face key -> ours, where nothing but the name differs.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_hidden",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tied",
    "initializer_range": "initializer_range",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
}

_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

_SCALING_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def refuse(raw: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    """Refuse a key whose value changes the arithmetic in a way that is not built.

    Raises:
        ModelError: the key is there with a value that is not in ``allowed``.
    """
    if key in raw and raw[key] not in allowed:
        listed = " or ".join(str(item).lower() for item in allowed)
        raise ModelError(
            f"{where}: {key} = {raw[key]!r}: expected {listed}; "
            "models that use it cannot be loaded here"
        )


def _rope(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling from either spelling: rope_theta + rope_scaling, or rope_parameters."""
    given = dict(raw.get("rope_parameters") or {})
    given.update(raw.get("rope_scaling") or {})
    result: dict[str, Any] = {}
    theta = given.get("rope_theta", raw.get("rope_theta"))
    if theta is not None:
        result["rope_theta"] = theta
    kind = given.get("rope_type", given.get("type", "default"))
    refuse(given, "partial_rotary_factor", (None, 1, 1.0), f"{where}: rope_scaling")
    if kind in (None, "default"):
        return result
    if kind not in _SCALING_KEYS:
        raise ModelError(
            f"{where}: rope_scaling.rope_type = {kind!r}: expected one of default, "
            f"{', '.join(_SCALING_KEYS)}"
        )
    keys = _SCALING_KEYS[kind]
    scaling = {key: given[key] for key in keys if given.get(key) is not None}
    result["rope_scaling"] = {"rope_type": kind, **scaling}
    return result


def read_common(
    raw: Mapping[str, Any],
    where: str,
    *,
    defaults: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> ModelConfig:
    """Our configuration from the shared keys.

    Args:
        raw: contents of ``config.json``.
        where: its path, for messages.
        defaults: values of the family for absent keys, by our names.
        extra: what the family has read itself, by our names.

    Raises:
        ModelError: a value is missing, of the wrong type, or beyond what is built.
    """
    refuse(raw, "hidden_act", ("silu", "swish"), where)
    refuse(raw, "quantization_config", (None,), where)
    for key in _NEEDED:
        if raw.get(key) is None:
            raise ModelError(f"{where}: {key} is missing; add it")
    values = {
        **defaults,
        **{ours: raw[key] for key, ours in _KEYS.items() if raw.get(key) is not None},
        **_rope(raw, where),
        **extra,
    }
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = tuple(values["eos_token_id"])
    values.setdefault("num_kv_heads", values["num_heads"])
    if "head_dim" not in values:
        hidden, heads = values["hidden"], values["num_heads"]
        if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0):
            raise ModelError(
                f"{where}: hidden_size = {hidden!r} and num_attention_heads = {heads!r}: "
                "expected whole numbers above 0"
            )
        values["head_dim"] = hidden // heads
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as cause:
        raise ModelError(str(explain(cause, where))) from None
    except ModelError as cause:
        raise ModelError(f"{where}: {cause}") from None


def write_common(config: ModelConfig, *, architecture: str, model_type: str) -> dict[str, Any]:
    """The shared keys of ``config.json``."""
    raw: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for key, ours in _KEYS.items():
        value = getattr(config, ours)
        raw[key] = list(value) if isinstance(value, tuple) else value
    raw["hidden_act"] = "silu"
    raw["attention_dropout"] = 0.0
    raw["use_cache"] = True
    raw["rope_theta"] = config.rope_theta
    raw["rope_scaling"] = None
    scaling = config.rope_scaling
    if scaling is not None:
        values = {key: getattr(scaling, key) for key in _SCALING_KEYS[scaling.rope_type]}
        raw["rope_scaling"] = {
            "rope_type": scaling.rope_type,
            **{key: value for key, value in values.items() if value is not None},
        }
    return raw


def attention_names(config: ModelConfig) -> Names:
    """Every tensor outside the feed-forward layers."""
    dim, width = config.hidden, config.head_dim
    query, key = config.num_heads * width, config.num_kv_heads * width
    embedding = (config.vocab_size, dim)
    names: Names = {"embed.weight": (ParameterPiece("model.embed_tokens.weight", embedding),)}
    for layer in range(config.num_layers):
        own, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        attention = f"{theirs}.self_attn"
        names[f"{own}.attention_norm.weight"] = (
            ParameterPiece(f"{theirs}.input_layernorm.weight", (dim,)),
        )
        names[f"{own}.attention.qkv_proj.weight"] = tuple(
            ParameterPiece(f"{attention}.{letter}_proj.weight", (rows, dim))
            for letter, rows in (("q", query), ("k", key), ("v", key))
        )
        if config.attention_bias:
            names[f"{own}.attention.qkv_proj.bias"] = tuple(
                ParameterPiece(f"{attention}.{letter}_proj.bias", (rows,))
                for letter, rows in (("q", query), ("k", key), ("v", key))
            )
        names[f"{own}.attention.o_proj.weight"] = (
            ParameterPiece(f"{attention}.o_proj.weight", (dim, query)),
        )
        if config.output_bias:
            names[f"{own}.attention.o_proj.bias"] = (
                ParameterPiece(f"{attention}.o_proj.bias", (dim,)),
            )
        if config.qk_norm:
            for letter in "qk":
                names[f"{own}.attention.{letter}_norm.weight"] = (
                    ParameterPiece(f"{attention}.{letter}_norm.weight", (width,)),
                )
        streams = config.architecture.streams
        if streams.num > 1:
            shape = (2, streams.num, streams.prefix, config.num_kv_heads, width)
            names[f"{own}.attention.prefix"] = (ParameterPiece(f"{attention}.prefix_kv", shape),)
        if config.family != "parallel":
            names[f"{own}.mlp_norm.weight"] = (
                ParameterPiece(f"{theirs}.post_attention_layernorm.weight", (dim,)),
            )
    names["norm.weight"] = (ParameterPiece("model.norm.weight", (dim,)),)
    if not config.tied:
        names["output.weight"] = (ParameterPiece("lm_head.weight", embedding),)
    num = config.architecture.streams.num
    if num > 1:
        for layer_name, rows, columns in (("up", dim, num * dim), ("down", num, dim)):
            own, theirs = f"aggregate.{layer_name}", f"model.aggregate.{layer_name}"
            names[f"{own}.weight"] = (ParameterPiece(f"{theirs}.weight", (rows, columns)),)
            names[f"{own}.bias"] = (ParameterPiece(f"{theirs}.bias", (rows,)),)
    return names


def dense_names(config: ModelConfig) -> Names:
    """Every tensor of a model with dense SwiGLU layers."""
    names = attention_names(config)
    dim, width = config.hidden, config.ffn_hidden
    for layer in range(config.num_layers):
        own, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
        names[f"{own}.gate_up_proj.weight"] = (
            ParameterPiece(f"{theirs}.gate_proj.weight", (width, dim)),
            ParameterPiece(f"{theirs}.up_proj.weight", (width, dim)),
        )
        names[f"{own}.down_proj.weight"] = (
            ParameterPiece(f"{theirs}.down_proj.weight", (dim, width)),
        )
        if config.ffn_bias:
            names[f"{own}.gate_up_proj.bias"] = (
                ParameterPiece(f"{theirs}.gate_proj.bias", (width,)),
                ParameterPiece(f"{theirs}.up_proj.bias", (width,)),
            )
            names[f"{own}.down_proj.bias"] = (ParameterPiece(f"{theirs}.down_proj.bias", (dim,)),)
        if config.architecture.ffn.duo:
            names |= _duo_names(config, own, theirs)
    return names


def _duo_names(config: ModelConfig, own: str, theirs: str) -> Names:
    """The small layer and the router beside a big feed-forward layer."""
    dim, width = config.hidden, config.architecture.ffn.small_width(config.ffn_hidden)
    return {
        f"{own}.small.gate_up_proj.weight": (
            ParameterPiece(f"{theirs}.small.gate_proj.weight", (width, dim)),
            ParameterPiece(f"{theirs}.small.up_proj.weight", (width, dim)),
        ),
        f"{own}.small.down_proj.weight": (
            ParameterPiece(f"{theirs}.small.down_proj.weight", (dim, width)),
        ),
        f"{own}.router.weight": (ParameterPiece(f"{theirs}.router.weight", (3, dim)),),
        f"{own}.router.bias": (ParameterPiece(f"{theirs}.router.bias", (3,)),),
    }
