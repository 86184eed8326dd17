"""The layers of a group as one wide layer: their matrices side by side, one product each.

Queries, keys and values of all layers are rows of one matrix. Where the feed-forward layers read
the same input too, so are their gates, and what is added to the stream is the sum of all of them:
columns of one matrix. The weights of norms are folded into what comes behind them.

Shapes: D hidden, n layers of a group, H query heads, d head_dim, F ffn_hidden.

Source: Wu et al., EasySpec, 2025, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.model.accelerate import accelerate_layers
from shoal.model.config import ModelConfig
from shoal.model.feedforward import SwiGLU
from shoal.model.norm import RMSNorm
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.plan.trees.fuzzy import Groups, spans


class StackedLayers(nn.Module):
    """The layers of a group.

    Args:
        blocks: of the group, before kernels pack their weights.
        full: their feed-forward layers read the same input, too.
    """

    def __init__(self, blocks: Sequence[TransformerBlock], config: ModelConfig, full: bool) -> None:
        super().__init__()
        weight = blocks[0].attention_norm.weight
        self.norm = _plain_norm(blocks[0].attention_norm)
        projections = [one.attention.qkv_proj for one in blocks]
        self.qkv_proj = _linear(
            torch.cat([_folded(one.attention_norm, one.attention.qkv_proj) for one in blocks]),
            torch.cat([one.bias for one in projections])
            if projections[0].bias is not None
            else None,
        )
        if full:
            self.mlp_norm = _plain_norm(blocks[0].mlp_norm)
            self.o_proj = _summed([one.attention.o_proj for one in blocks])
            self.mlp = _wide([one.mlp for one in blocks], [one.mlp_norm for one in blocks], config)
        self.to(weight.dtype).requires_grad_(False)


def _plain_norm(like: RMSNorm) -> RMSNorm:
    norm = RMSNorm(len(like.weight), like.eps)
    return norm.to(like.weight.device)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    made = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _folded(norm: RMSNorm, linear: nn.Linear) -> Tensor:
    return linear.weight * norm.weight


def _summed(linears: Sequence[nn.Linear]) -> nn.Linear:
    """The sum of what several give, each of its own input; these lie one behind the other."""
    biases: list[Tensor] = [one.bias for one in linears]
    return _linear(
        torch.cat([one.weight for one in linears], 1),
        torch.stack(biases).sum(0) if biases[0] is not None else None,
    )


def _wide(mlps: Sequence[nn.Module], norms: Sequence[RMSNorm], config: ModelConfig) -> SwiGLU:
    """The sum of several feed-forward layers of one input."""
    layers = [one for one in mlps if isinstance(one, SwiGLU)]
    if len(layers) < len(mlps):
        raise ModelError(
            f"model {config.name}: stale = full adds up feed-forward layers, and its layers have "
            "experts; use stale: attention"
        )
    width = config.ffn_hidden
    weights = [_folded(norm, one.gate_up_proj) for norm, one in zip(norms, layers, strict=True)]
    gates, ups = [one[:width] for one in weights], [one[width:] for one in weights]
    bias = None
    if config.ffn_bias:
        biases = [one.gate_up_proj.bias for one in layers]
        bias = torch.cat([*(one[:width] for one in biases), *(one[width:] for one in biases)])
    with torch.device("meta"):
        made = SwiGLU(config.model_copy(update={"ffn_hidden": width * len(layers)}))
    made.gate_up_proj = _linear(torch.cat([*gates, *ups]), bias)
    made.down_proj = _summed([one.down_proj for one in layers])
    return made


def stack(
    raw: Transformer, groups: Groups, full: bool, served: Transformer
) -> dict[int, StackedLayers]:
    """By its first layer, each group of several layers as one.

    Args:
        raw: the draft, before kernels pack its weights.
        groups: of its layers.
        full: feed-forward layers are stacked, too.
        served: the same draft, ready to serve.

    Raises:
        ModelError: the draft's layers cannot be stacked.
    """
    if raw.config.qk_norm:
        raise ModelError(
            f"model {raw.config.name}: norms of queries and keys differ from layer to layer, and "
            "realise = fused rotates all of a group at once; use realise: sequential"
        )
    result = {}
    for layers in spans(groups, len(raw.blocks)):
        if len(layers) > 1:
            blocks = [raw.blocks[layer] for layer in layers]
            made = StackedLayers(
                [one for one in blocks if isinstance(one, TransformerBlock)], raw.config, full
            )
            if served.norm.kernel is not None:
                accelerate_layers(made, served)
            result[layers[0]] = made
    return result
