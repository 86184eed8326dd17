"""GGUF files, as llama.cpp writes them, read into a model.

Weights become plain ones, in the dtype asked for. In files of the architecture llama the rows
of queries and keys are interleaved in pairs for another rotary embedding, and are put back.
The file's own vocabulary is not read: a tokenizer.json must be given beside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.core.parts import explain
from shoal.model import FAMILIES
from shoal.model.config import ModelConfig, RopeScaling
from shoal.model.families.common import ParameterPiece
from shoal.model.finite import check_finite
from shoal.model.gguf_blocks import decode
from shoal.model.gguf_header import GgufHeader, GgufTensor, read_header
from shoal.model.initialise import empty
from shoal.model.rope import frequencies
from shoal.model.transformer import Transformer

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Our key -> that of the file, behind the name of the architecture.
_KEYS = {
    "hidden": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "ffn_hidden": "feed_forward_length",
    "max_position": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}

# What stands behind model.layers.N in Hugging Face's names -> behind blk.N in the file's.
_LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

_ROPE = "rope_freqs.weight"


def read_config(path: Path) -> ModelConfig:
    """The configuration of a GGUF file.

    Raises:
        ModelError: no GGUF file, or of a model that is not read.
    """
    return _config(path, read_header(path))


def _config(path: Path, header: GgufHeader) -> ModelConfig:
    values, tensors = header.values, header.tensors
    kind = values.get("general.architecture")
    if kind not in _FAMILIES:
        raise ModelError(
            f"{path}: general.architecture = {kind!r}: expected one of {', '.join(_FAMILIES)}; "
            "models of other architectures cannot be loaded"
        )

    def of(key: str, default: Any = None) -> Any:
        return values.get(f"{kind}.{key}", default)

    if of("expert_count", 0):
        raise ModelError(
            f"{path}: {kind}.expert_count: models with experts are not read; use the "
            "Hugging Face directory of the model"
        )
    result: dict[str, Any] = {ours: of(theirs) for ours, theirs in _KEYS.items()}
    for ours, theirs in _KEYS.items():
        if result[ours] is None:
            raise ModelError(f"{path}: the key {kind}.{theirs} is missing; fetch the file again")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: the tensor token_embd.weight is missing; fetch the file again")
    heads, hidden = result["num_heads"], result["hidden"]
    width = of("attention.key_length")
    if width is None and type(heads) is int and type(hidden) is int and heads > 0:
        width = hidden // heads
    result |= {
        "family": _FAMILIES[kind],
        "vocab_size": embedding.shape[0],
        "num_kv_heads": of("attention.head_count_kv", heads),
        "head_dim": width,
        "rms_norm_eps": _decimal(result["rms_norm_eps"]),
        "rope_theta": _decimal(of("rope.freq_base", 10000.0)),
        "tied": "output.weight" not in tensors,
        "qk_norm": kind == "qwen3",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "ffn_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    for key in ("rope.dimension_count", "attention.value_length"):
        if of(key, width) != width:
            raise ModelError(
                f"{path}: {kind}.{key} = {of(key)!r}: expected {width}, as of the keys"
            )
    scaling = of("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{path}: {kind}.rope.scaling.type = {scaling!r}: expected none, linear or yarn"
        )
    try:
        if scaling != "none":
            more = {"original_max_position_embeddings": of("rope.scaling.original_context_length")}
            result["rope_scaling"] = RopeScaling(
                rope_type=scaling,
                factor=of("rope.scaling.factor"),
                **(more if scaling == "yarn" else {}),
            )
        config = ModelConfig.model_validate({"name": path.stem, **result})
    except ValidationError as cause:
        raise ModelError(str(explain(cause, str(path)))) from None
    except ModelError as cause:
        raise ModelError(f"{path}: {cause}") from None
    if _ROPE in tensors:
        config = _llama3(path, config, _tensor(path, tensors[_ROPE]))
    return config


def _decimal(value: Any) -> Any:
    """The decimal number before it was stored in 32 bits: 1e-06 and not 9.99999997e-07."""
    return float(f"{value:.7g}") if type(value) is float else value


def _llama3(path: Path, config: ModelConfig, factors_C: Tensor) -> ModelConfig:
    """The scaling of Llama 3, of which the file has nothing but the factors that follow.

    Raises:
        ModelError: they follow from no scaling that is known here.
    """
    plain, _ = frequencies(config, 1)
    for original in (8192, 4096, 16384, 32768):
        made = config.model_copy(
            update={
                "rope_scaling": RopeScaling(
                    rope_type="llama3",
                    factor=float(factors_C.max()),
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=original,
                )
            }
        )
        scaled, _ = frequencies(made, 1)
        if factors_C.shape == plain.shape and torch.allclose(plain / scaled, factors_C, rtol=1e-3):
            return made
    raise ModelError(
        f"{path}: the factors in {_ROPE} are of no rope scaling that is read; use the Hugging Face "
        "directory of the model"
    )


def _name(piece: str) -> str:
    """The file's name of a tensor of Hugging Face."""
    base, _, leaf = piece.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", base)
    if match is not None:
        return f"blk.{match[1]}.{_LEAVES[match[2]]}.{leaf}"
    return f"{_OUTER[base]}.{leaf}"


def _tensor(path: Path, tensor: GgufTensor) -> Tensor:
    raw = np.fromfile(path, dtype=np.uint8, count=tensor.stop - tensor.start, offset=tensor.start)
    return decode(tensor.kind, raw, tensor.shape)


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of every head from pairs side by side to first halves, then second halves."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def read(path: Path, dtype: torch.dtype | None = None) -> Transformer:
    """A model from a GGUF file; nothing is allocated before the file was checked.

    Args:
        path: the file.
        dtype: of the weights; if not given, fp32 where the file has fp32 embeddings, else bf16.

    Raises:
        ModelError: anything is missing, malformed or not supported.
    """
    header = read_header(path)
    config = _config(path, header)
    names = FAMILIES.build(config.family).names(config)
    _check(path, config, names, header.tensors)
    if dtype is None:
        plain = header.tensors["token_embd.weight"].kind == "F32"
        dtype = torch.float32 if plain else torch.bfloat16
    interleaved = header.values["general.architecture"] == "llama"
    model = empty(config)
    try:
        for name, pieces in names.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            value = torch.empty(getattr(owner, leaf).shape, dtype=dtype)
            parts = torch.split(value.view(-1), [piece.numel for piece in pieces])
            for part, piece in zip(parts, pieces, strict=True):
                tensor = _tensor(path, header.tensors[_name(piece.name)])
                if interleaved and re.search(r"\.self_attn\.[qk]_proj\.", piece.name):
                    tensor = _halves(tensor, config.head_dim)
                part.view(piece.shape).copy_(tensor)
            check_finite(value, f"{path}: {name}")
            setattr(owner, leaf, torch.nn.Parameter(value))
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    return model


def _check(
    path: Path,
    config: ModelConfig,
    names: Mapping[str, tuple[ParameterPiece, ...]],
    tensors: Mapping[str, GgufTensor],
) -> None:
    """Every tensor that the configuration needs is there and has its shape; none is left over."""
    wanted = {_name(piece.name): piece.shape for pieces in names.values() for piece in pieces}
    for name, shape in wanted.items():
        if name not in tensors:
            raise ModelError(f"{path}: the tensor {name} is missing; fetch the file again")
        if tensors[name].shape != shape:
            raise ModelError(
                f"{path}: tensor {name} has the shape {list(tensors[name].shape)}, and its keys "
                f"ask for {list(shape)}; it is damaged"
            )
    for name in tensors:
        if name not in wanted and name != _ROPE:
            raise ModelError(
                f"{path}: the tensor {name} belongs to no part of a model of the family "
                f"{config.family}; use the Hugging Face directory of the model"
            )
