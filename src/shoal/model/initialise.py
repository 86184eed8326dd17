"""Fresh weights, the same on any number of ranks.

Every stored tensor has its own stream of random numbers, keyed by its name: values do
not depend on which rank draws them, on the order, or on which matrices are fused.

Source: normal initialisation with the residual projections scaled by 1 / sqrt(2 L),
Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.model import FAMILIES
from shoal.model.config import ModelConfig
from shoal.model.families.common import ParameterPiece
from shoal.model.transformer import Transformer

# Matrices whose output is added to the residual stream, by Hugging Face name.
_RESIDUAL = (".o_proj.weight", ".down_proj.weight", ".w2.weight")
# Of a softmax over cosines, so that it begins soft.
_TEMPERATURE = 0.3


def _piece(config: ModelConfig, piece: ParameterPiece, seed: int) -> np.ndarray:
    if piece.name.endswith("norm.weight"):
        return np.ones(piece.shape, dtype=np.float32)
    if piece.name.endswith((".bias", ".gate_bias")):
        return np.zeros(piece.shape, dtype=np.float32)
    if piece.name.endswith("gate_temperature"):
        return np.full(piece.shape, _TEMPERATURE, dtype=np.float32)
    std = config.initializer_range
    if piece.name.endswith(_RESIDUAL):
        std /= math.sqrt(2 * config.num_layers)
    source = generator(seed, purpose=f"init {piece.name}")
    values = source.standard_normal(piece.shape, dtype=np.float32)
    values *= np.float32(std)
    return values


def initial(config: ModelConfig, name: str, seed: int) -> Tensor:
    """The fresh value of one parameter, whole, in fp32 on the CPU; a rank may keep its part."""
    pieces = FAMILIES.build(config.family).names(config)[name]
    return torch.from_numpy(
        np.concatenate([_piece(config, piece, seed).reshape(-1) for piece in pieces])
    )


@torch.no_grad()
def init_weights(model: Transformer, seed: int, *, device: torch.device | str = "cpu") -> None:
    """Give every parameter its fresh value; parameters on ``meta`` come into being one by one.

    Args:
        model: its weights are replaced.
        seed: seed of the run.
        device: where parameters on ``meta`` go.
    """
    for name, parameter in list(model.named_parameters()):
        value = initial(model.config, name, seed).view(parameter.shape)
        if parameter.is_meta:
            owner_name, _, leaf = name.rpartition(".")
            value = value.to(device, parameter.dtype)
            fresh = torch.nn.Parameter(value, parameter.requires_grad)
            setattr(model.get_submodule(owner_name), leaf, fresh)
        else:
            parameter.copy_(value)


def empty(config: ModelConfig) -> Transformer:
    """A model whose parameters have shapes and no memory."""
    with torch.device("meta"):
        return Transformer(config)
