"""Nets with fresh weights that depend on the seed alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from shoal.core.random import seed64
from shoal.model.config import ModelConfig
from shoal.model.drafters.falcon import SemiAutoregressive
from shoal.model.drafters.fusion import FusionDrafter

# Matrices whose output is added to the stream begin small.
_RESIDUAL = (".o_proj.weight", ".down_proj.weight")


@torch.no_grad()
def _drawn(net: nn.Module, config: ModelConfig, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed64(seed, purpose="drafter net"))
    for name, parameter in net.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif parameter.dim() < 2:
            parameter.zero_()
        else:
            std = config.initializer_range
            if "lstm" in name or not name.startswith("block"):
                std = 1 / math.sqrt(parameter.shape[1])  # what is read has the size of a feature
            elif name.endswith(_RESIDUAL):
                std /= math.sqrt(2.0)
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * std)


def falcon(config: ModelConfig, k: int, lstm_layers: int, seed: int) -> SemiAutoregressive:
    """A net that gives k features a pass."""
    net = SemiAutoregressive(config, k, lstm_layers)
    _drawn(net, config, seed)
    return net


def fusion(config: ModelConfig, layers: int, seed: int) -> FusionDrafter:
    """A gate and some layers."""
    net = FusionDrafter(config, layers)
    _drawn(net, config, seed)
    return net
