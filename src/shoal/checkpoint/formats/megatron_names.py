"""How Megatron Core names and lays out the parameters of our models.

Its fused projection has the queries, keys and values of one key/value group behind each other,
group after group; ours has all queries, then all keys, then all values. Experts are matrices of
their own there and one tensor here. Everything else differs by name alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig

# Ours -> theirs, behind the number of the layer.
_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.qkv_proj": "self_attention.linear_qkv",
    "attention.o_proj": "self_attention.linear_proj",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp_norm.weight": "pre_mlp_layernorm.weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
_TOP = {
    "embed.weight": "embedding.word_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "output.weight": "output_layer.weight",
}
# What kernels with a fused norm call it.
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "mlp_norm.weight",
}
_THEIR_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_OUR_EXPERTS = {"linear_fc1": "mlp.gate_up_proj", "linear_fc2": "mlp.down_proj"}


def to_megatron(
    tensors: Mapping[str, Tensor], first_layer: int, config: ModelConfig
) -> dict[str, Tensor]:
    """One rank's tensors under Megatron's names and in its order.

    Args:
        tensors: local tensors by our names.
        first_layer: number of the stage's first block; Megatron counts from it.
        config: the model.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in _TOP:
            result[_TOP[name]] = tensor
            continue
        _, number, rest = name.split(".", 2)
        layer = f"decoder.layers.{int(number) - first_layer}"
        if rest in _OUR_EXPERTS.values():
            leaf = next(theirs for theirs, ours in _OUR_EXPERTS.items() if ours == rest)
            for expert, matrix in enumerate(tensor):
                result[f"{layer}.mlp.experts.local_experts.{expert}.{leaf}.weight"] = matrix
            continue
        stem, _, leaf = rest.rpartition(".")
        theirs = _LAYER.get(rest) or f"{_LAYER[stem]}.{leaf}"
        result[f"{layer}.{theirs}"] = (
            grouped(tensor, config) if stem == "attention.qkv_proj" else tensor
        )
    return result


def from_megatron(
    tensors: Mapping[str, Tensor], first_layer: int, config: ModelConfig, where: str
) -> dict[str, Tensor]:
    """The same of what a Megatron rank holds, under our names and in our order.

    Raises:
        CheckpointError: a name that no model here has.
    """
    import torch

    top = {theirs: ours for ours, theirs in _TOP.items()}
    layer_names = {theirs: ours for ours, theirs in _LAYER.items()} | _ALIASES
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith("_extra_state") or tensor is None:
            continue  # scaling factors of 8-bit kernels, which start anew
        if name in top:
            ours = top[name]
            # The last stage's copy of a shared embedding.
            result["embed.weight" if ours == "output.weight" and config.tied else ours] = tensor
            continue
        match = _THEIR_LAYER.match(name)
        rest = match.group(2) if match else ""
        block = f"blocks.{first_layer + int(match.group(1))}" if match else ""
        expert = _EXPERT.match(rest)
        if expert:
            stacked = experts.setdefault(f"{block}.{_OUR_EXPERTS[expert.group(2)]}", {})
            stacked[int(expert.group(1))] = tensor
            continue
        stem, _, leaf = rest.rpartition(".")
        own = layer_names.get(rest) or (
            f"{layer_names[stem]}.{leaf}" if stem in layer_names else ""
        )
        if not own:
            raise CheckpointError(
                f"{where}: the parameter {name} belongs to no model that is built here; its "
                "checkpoint cannot be imported"
            )
        ungroup = own.startswith("attention.qkv_proj")
        result[f"{block}.{own}"] = ungrouped(tensor, config) if ungroup else tensor
    for name, held in experts.items():
        result[name] = torch.stack([held[number] for number in sorted(held)])
    return result


def ungrouped(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Group after group -> queries, keys, values; of one rank's rows."""
    import torch

    queries = config.num_heads // config.num_kv_heads
    rows = tensor.reshape(-1, queries + 2, config.head_dim, *tensor.shape[1:])
    parts = rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :]
    return torch.cat([part.flatten(0, 2) for part in parts])


def grouped(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Queries, keys, values -> group after group; of one rank's rows."""
    import torch

    queries = config.num_heads // config.num_kv_heads
    groups = tensor.shape[0] // ((queries + 2) * config.head_dim)
    sizes = [groups * queries * config.head_dim, *[groups * config.head_dim] * 2]
    q, k, v = torch.split(tensor, sizes)
    rest = tensor.shape[1:]
    parts = [part.reshape(groups, -1, config.head_dim, *rest) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def config_of(args: Any, padded_vocab: int, where: str) -> ModelConfig:
    """The model that a foreign run's arguments describe.

    Raises:
        CheckpointError: it is none that is built here.
    """
    from shoal.model.config import ModelConfig

    def get(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    wanted = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
    for key, value in wanted.items():
        if get(key) != value:
            raise CheckpointError(
                f"{where}: args.{key} = {get(key)!r}: only models with {value!r} are built here; "
                "its checkpoint cannot be imported"
            )
    experts = int(get("num_experts") or 0)
    heads = int(get("num_attention_heads"))
    grouped_query = bool(get("group_query_attention"))
    family = "mixtral" if experts else "qwen3" if get("qk_layernorm") else "llama"
    if get("add_qkv_bias"):
        family = "qwen2"
    vocab = int(get("vocab_size") or padded_vocab)
    return ModelConfig.model_validate(
        {
            "family": family,
            "vocab_size": min(vocab, padded_vocab),
            "hidden": int(get("hidden_size")),
            "num_layers": int(get("num_layers")),
            "num_heads": heads,
            "num_kv_heads": int(get("num_query_groups")) if grouped_query else heads,
            "head_dim": int(get("kv_channels") or get("hidden_size") // heads),
            "ffn_hidden": int(get("ffn_hidden_size")),
            "max_position": int(get("max_position_embeddings") or 2048),
            "rope_theta": float(get("rotary_base") or 10000.0),
            "tied": not get("untie_embeddings_and_output_weights"),
            "attention_bias": bool(get("add_qkv_bias")),
            "qk_norm": bool(get("qk_layernorm")),
            "num_experts": experts,
            **({"top_k": int(get("moe_router_topk") or 2)} if experts else {}),
        }
    )
