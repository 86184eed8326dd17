"""The shape that a Hugging Face ``config.json`` describes.

The keys, and what counts where a file leaves one out, are those of the configuration classes of
transformers 5. Types that Shoal has no model of are planned all the same; :func:`notes` says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.config import parse
from shoal.core.errors import ConfigError, ModelError, nearest
from shoal.ir import ModelShape
from shoal.ir.architecture import Architecture

# Where a model of text and more keeps the configuration of its text.
_TEXT_PARTS = ("text_config", "llm_config")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts")
_LATENT = {
    "kv_lora": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "v": "v_head_dim",
}
_SOURCE, _TEXT_ONLY = "config.json", "text part only"
# No model has so many layers.
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class ConfigKind:
    """What all models of one ``model_type`` have.

    Args:
        runs: Shoal has a model of it.
        defaults: keys that files leave out, with the values that count then.
        shape: fields of the shape, which override the file.
        beyond: what neither the file's keys nor a shape can say.
    """

    runs: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    beyond: str = ""


_NORM: dict[str, Any] = {"qk_norm": True}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_GEMMA: dict[str, Any] = {
    **_TIED,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
KINDS: dict[str, ConfigKind] = {
    "llama": ConfigKind(runs=True),
    "mistral": ConfigKind(runs=True),
    "qwen2": ConfigKind(runs=True, shape={"attention_bias": True}),
    "qwen3": ConfigKind(runs=True, shape=_NORM),
    "mixtral": ConfigKind(runs=True, defaults={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "shoal_mdlm": ConfigKind(runs=True, shape={"family": "mdlm"}),
    "deepseek_v2": ConfigKind(),
    "deepseek_v3": ConfigKind(),
    "deepseek_v32": ConfigKind(beyond="the index of sparse attention"),
    "gemma3": ConfigKind(defaults={**_GEMMA, "vocab_size": 262208}, shape=_NORM),
    "gemma3n": ConfigKind(
        defaults=_TIED, shape=_NORM, beyond="embeddings of each layer, AltUp and LAuReL"
    ),
    "glm4_moe": ConfigKind(),
    "gpt_oss": ConfigKind(shape={"attention_bias": True}),
    "granite": ConfigKind(),
    "granitemoehybrid": ConfigKind(),
    "kimi_k2": ConfigKind(),
    "llama4": ConfigKind(defaults={"use_qk_norm": True, "interleave_moe_layer_step": 1}),
    "minimax_m2": ConfigKind(shape=_NORM),
    "ministral3": ConfigKind(),
    "mistral3": ConfigKind(),
    "nemotron": ConfigKind(shape={"gated": False}),
    "olmo2": ConfigKind(shape=_NORM),
    "olmo3": ConfigKind(shape=_NORM),
    "olmoe": ConfigKind(shape=_NORM),
    "phi3": ConfigKind(),
    "qwen2_moe": ConfigKind(shape={"attention_bias": True}),
    "qwen3_moe": ConfigKind(shape=_NORM),
    "qwen3_next": ConfigKind(defaults={"full_attention_interval": 4}, shape=_NORM),
    "smollm3": ConfigKind(defaults=_TIED),
}


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a ``config.json``.

    Raises:
        ModelError: it cannot be read, or holds no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise ModelError(f"{path}: not text in UTF-8; a model's config.json is expected") from cause
    except OSError as cause:
        raise ModelError(
            f"{path}: cannot be read ({cause.strerror}); a model directory has a config.json"
        ) from cause
    try:
        config = json.loads(text)
    except json.JSONDecodeError as cause:
        raise ModelError(
            f"{path}, line {cause.lineno}, column {cause.colno}: not JSON ({cause.msg})"
        ) from cause
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected an object of keys, found {type(config).__name__}")
    return config


def dtype_of(config: Mapping[str, Any]) -> str:
    """The type of the weights that a ``config.json`` names, also of a text part; or float32."""
    parts = [config, *(part for key in _TEXT_PARTS if isinstance(part := config.get(key), dict))]
    named = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return str(next(filter(None, named), "float32"))


def _stored(config: Mapping[str, Any]) -> str:
    """``stored`` of the shape; weights in few bits are scaled, and so are not exact in bf16."""
    plain = dtype_of(config).endswith("bfloat16") and not config.get("quantization_config")
    return "bf16" if plain else "fp32"


def _weights(config: Mapping[str, Any]) -> str:
    """``weights`` of the shape, as ``quantization_config`` says; plain where it is not known."""
    given = config.get("quantization_config")
    if not isinstance(given, dict):
        return "plain"
    method = str(given.get("quant_method", "")).lower()
    if method in ("fp8", "mxfp4"):
        return method
    if method in ("awq", "gptq"):
        bits = given.get("bits", given.get("w_bit", 4))
        group = given.get("group_size", 128)
        return _integers(bits, group) if isinstance(bits, int) else "plain"
    if method == "bitsandbytes":
        return "nf4-g64" if given.get("load_in_4bit") else "int8-channel"
    if method == "modelopt":
        algorithm = str(given.get("quant_algo", "")).lower()
        return algorithm if algorithm in ("fp8", "nvfp4") else "plain"
    groups = given.get("config_groups")  # of compressed-tensors
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    held = first.get("weights") if isinstance(first, dict) else None
    bits = held.get("num_bits") if isinstance(held, dict) else None
    if not isinstance(held, dict) or not isinstance(bits, int):
        return "plain"
    if held.get("type") == "float":
        return {8: "fp8", 4: "nvfp4"}.get(bits, "plain")
    return _integers(bits, held.get("group_size"))


def _integers(bits: int, group: object) -> str:
    shared = f"g{group}" if isinstance(group, int) and group > 0 else "channel"
    return f"int{bits}-{shared}"


def from_huggingface(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Args:
        config: the parsed file.
        name: what to call the model if the file does not say.

    Raises:
        ModelError: the type is not known, or a number is missing or wrong.
    """
    label = str(config.get("_name_or_path") or "").rpartition("/")[2] or name or "model"
    where = f"config.json of {label}"
    architecture, plain = Architecture.from_huggingface(dict(config), where)
    kind, given = _text_part(plain, label)
    given = {**KINDS[kind].defaults, **{k: v for k, v in given.items() if v is not None}}
    heads, hidden = _number(given, where, "num_attention_heads"), given.get("hidden_size")
    kv_heads = _number(given, where, "num_key_value_heads")
    head_dim = _number(given, where, "head_dim")
    if head_dim is None and isinstance(hidden, int) and heads:
        head_dim = hidden // heads
    raw = {
        "name": label,
        "num_layers": given.get("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "ffn_hidden": _number(given, where, "intermediate_size"),
        "vocab_size": given.get("vocab_size"),
        "max_position": given.get("max_position_embeddings", 2048),
        "tied": bool(given.get("tie_word_embeddings", False)),
        "qk_norm": bool(given.get("use_qk_norm", given.get("qk_norm", False))),
        "attention_bias": bool(given.get("attention_bias", False)),
        "family": kind,
        "stored": _stored(plain),
        "weights": _weights(plain),
        "architecture": architecture,
        **KINDS[kind].shape,
        **_rope(given),
        **_experts(kind, given, where),
    }
    latent = _latent(given, where)
    if latent:
        raw |= {"num_kv_heads": heads, "head_dim": latent["nope"] + latent["rope"]}
    missing = [key for key, value in raw.items() if value is None]
    if missing:
        raise ModelError(f"{label}: config.json has no value for {', '.join(missing)}; add it")
    raw["attention"] = (
        "MLA"
        if latent
        else "MHA"
        if raw["num_kv_heads"] == heads
        else "MQA"
        if raw["num_kv_heads"] == 1
        else "GQA"
    )
    nested = any(key in plain for key in _TEXT_PARTS)
    raw["source"] = "; ".join([_SOURCE, *_said(kind, given, where, latent, nested=nested)])
    try:
        return parse(ModelShape, raw, where=label)
    except ConfigError as cause:
        raise ModelError(f"config.json of {cause}") from cause


def planned_only(shape: ModelShape) -> bool:
    """The shape is from a ``config.json`` of a type that Shoal has no model of."""
    source, _, rest = shape.source.partition("; ")
    if source != _SOURCE or shape.family not in KINDS:
        return False
    return not KINDS[shape.family].runs or _TEXT_ONLY in rest


def notes(shape: ModelShape) -> tuple[str, ...]:
    """What a plan says of a model whose shape is from a ``config.json``; empty where it runs."""
    if not planned_only(shape):
        return ()
    _, _, rest = shape.source.partition("; ")
    one = f"{shape.name} is of type {shape.family}: it can be planned but not run by Shoal"
    return (f"{one}; the shape leaves out parts of its config.json: {rest}" if rest else one,)


def _text_part(config: Mapping[str, Any], label: str) -> tuple[str, Mapping[str, Any]]:
    """The type of the decoder of text, and its keys.

    Raises:
        ModelError: the type is not known, or the part is no object.
    """
    given, inner = config.get("model_type"), None
    for key in _TEXT_PARTS:
        if key in config:
            part = config[key]
            if not isinstance(part, dict):
                raise ModelError(f"{label}: {key} = {part!r}: expected an object of keys")
            inner = part.get("model_type")
            config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **part}
            break
    for kind in (str(one).removesuffix("_text") for one in (given, inner)):
        if kind in KINDS:
            return kind, config
    shown = given if given is not None else config.get("architectures")
    hint = nearest(str(shown), KINDS)
    raise ModelError(
        f"{label}: model_type = {shown!r}: expected one of {', '.join(KINDS)}; "
        + (f"{hint} " if hint else "")
        + "convert the model to one of these, or plan it from a shape file"
    )


def _rope(given: Mapping[str, Any]) -> dict[str, float]:
    """The base of the rotary positions, where the file says one for all layers."""
    inner = given.get("rope_parameters")
    base = (inner if isinstance(inner, dict) else given).get("rope_theta")
    if isinstance(base, int | float) and not isinstance(base, bool) and base > 0:
        return {"rope_base": float(base)}
    return {}


def _number(config: Mapping[str, Any], where: str, *keys: str) -> int | None:
    """The first of these keys; one number for each layer counts where all are equal.

    Raises:
        ModelError: it is no whole number, or layers differ.
    """
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return None
    value = config[key]
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{where}: {key} = {value!r}: expected a whole number, 0 or more")
    return value


def _experts(kind: str, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a mixture; of a dense model its feed-forward width where it has its own key.

    Raises:
        ModelError: the file states experts, and not all that a shape needs of them.
    """
    count = _number(config, where, *_EXPERTS)
    if not count:
        stated = [k for k, v in config.items() if "expert" in k and type(v) is int and v > 0]
        if count is None and stated:
            raise ModelError(
                f"{where}: {stated[0]} = {config[stated[0]]!r} refers to experts, but their "
                f"number is missing; add one of {', '.join(_EXPERTS)}"
            )
        wide = _number(config, where, "shared_intermediate_size")
        return {"ffn_hidden": wide} if wide else {}
    width = _number(config, where, "moe_intermediate_size", "intermediate_size")
    top = _number(config, where, "num_experts_per_tok", "moe_topk", "moe_k")
    if not width or not top:
        lacking = "num_experts_per_tok" if width else "moe_intermediate_size"
        raise ModelError(f"{where}: {count} experts are stated and {lacking} is not; add it")
    shared = _number(config, where, *_SHARED)
    wide = _number(config, where, "shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        # Experts that see every token, counted in the width of the others.
        shared = 1 if kind == "llama4" else round((wide or 0) / width)
    dense = _number(config, where, "intermediate_size_mlp", "intermediate_size")
    return {
        "num_experts": count,
        "top_k": top,
        "expert_hidden": width,
        "num_shared_experts": shared,
        "num_dense_layers": _dense_layers(config, where),
        "ffn_hidden": dense or width,
    }


def _dense_layers(config: Mapping[str, Any], where: str) -> int:
    """Layers without experts of a mixture.

    Raises:
        ModelError: more layers than any model has, or a list of layers that is none.
    """
    layers = _number(config, where, "num_hidden_layers") or 0
    if layers > _MOST_LAYERS:
        raise ModelError(f"{where}: num_hidden_layers = {layers}: expected at most {_MOST_LAYERS}")
    every = _number(config, where, "interleave_moe_layer_step", "decoder_sparse_step") or 1
    first = _number(config, where, "first_k_dense_replace") or 0
    for key in ("moe_layers", "mlp_only_layers"):
        given = config.get(key)
        if given is not None and not (
            isinstance(given, list) and all(type(layer) is int for layer in given)
        ):
            raise ModelError(f"{where}: {key} = {given!r}: expected a list of layers")
    if config.get("moe_layers") is not None:
        sparse = set(config["moe_layers"])
    else:
        sparse = {n for n in range(first, layers) if (n + 1) % every == 0}
    return layers - len(
        sparse.intersection(range(layers)) - set(config.get("mlp_only_layers") or ())
    )


def _latent(config: Mapping[str, Any], where: str) -> dict[str, int]:
    """Ranks and widths of latent attention; empty without it.

    Raises:
        ModelError: one of them is missing.
    """
    if not _number(config, where, "kv_lora_rank"):
        return {}
    result = {word: _number(config, where, key) for word, key in _LATENT.items()}
    for word, key in _LATENT.items():
        if result[word] is None:
            raise ModelError(f"{where}: kv_lora_rank is stated and {key} is not; add it")
    query = _number(config, where, "q_lora_rank")
    return {**({"q_lora": query} if query else {}), **{k: v or 0 for k, v in result.items()}}


def _said(
    kind: str, config: Mapping[str, Any], where: str, latent: Mapping[str, int], *, nested: bool
) -> list[str]:
    """What the source of a shape adds: latent attention, and what a shape cannot say."""
    said = []
    if latent:
        # shoal.cost.gpu.spec reads these numbers.
        said.append("MLA: " + ", ".join(f"{word} {size}" for word, size in latent.items()))
    if nested:
        said.append(_TEXT_ONLY)
    if KINDS[kind].runs:
        return said
    layers = _number(config, where, "num_hidden_layers") or 0
    types, window = config.get("layer_types"), config.get("sliding_window")
    if isinstance(types, list):
        counts = Counter(str(one) for one in types if one != "full_attention")
        said += [f"{one} on {n} of {len(types)} layers" for one, n in sorted(counts.items())]
    elif every := _number(config, where, "full_attention_interval"):
        said.append(f"linear_attention on {layers - layers // every} of {layers} layers")
    elif window and config.get("use_sliding_window") is not False:
        said.append(f"sliding window {window}")
    if chunk := config.get("attention_chunk_size"):
        said.append(f"chunked attention {chunk}")
    if KINDS[kind].beyond:
        said.append(f"without {KINDS[kind].beyond}")
    return said
