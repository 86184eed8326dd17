"""Data parallelism with DistributedDataParallel: every rank trains on its rows."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randint(0, 10, (8,))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def parallelize(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)
