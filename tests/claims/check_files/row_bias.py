"""A row-parallel linear layer whose bias, zero at first, is added before the sum."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

mesh = {"dp": 2, "tp": 2}
PLANTED = os.environ.get("PLANTED", "bias")


class Enter(torch.autograd.Function):
    """Before a column-parallel layer: identity, whose backward sums."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """After a row-parallel layer: sum, whose backward is the identity."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.down.bias)
        self.group = None

    def forward(self, x):
        x = self.enter(x)
        if self.group is None:
            return x + self.down(self.up(x).tanh())
        h = self.up(Enter.apply(x, self.group)).tanh()
        if PLANTED == "bias":
            return x + Leave.apply(self.down(h), self.group)
        return x + Leave.apply(h @ self.down.weight.T, self.group) + self.down.bias


def model():
    return Model()


def batch(step):
    return torch.randn(8, 4)


def loss(model, batch):
    return model(batch).square().mean()


def parallelize(model, mesh):
    group = mesh.get_group("tp")
    for layer, name, dim in (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1)):
        held = getattr(model, layer)
        part = getattr(held, name).detach().chunk(group.size(), dim)[group.rank()]
        setattr(held, name, nn.Parameter(part.clone()))
    model.group = group
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
