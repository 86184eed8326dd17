"""DDP over rows with differently many counted tokens; PLANTED names its bug."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PLANTED = os.environ.get("PLANTED", "divisor")


def model():
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))


def batch(step):
    tokens = torch.randint(0, 20, (4, 7))
    targets = tokens.roll(-1, 1)
    for row, length in enumerate((7, 6, 2, 1)):
        targets[row, length:] = -100
    return {"tokens": tokens, "targets": targets}


def loss(model, batch):
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    if PLANTED == "divisor":
        return nn.functional.cross_entropy(logits, targets)
    count = (targets != -100).sum()
    dist.all_reduce(count)
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    # DDP averages, so each rank's share is taken times the number of ranks.
    return total / count * (1 if PLANTED == "sum" else dist.get_world_size())


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parallelize(model, mesh):
    return DistributedDataParallel(model)
