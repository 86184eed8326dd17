"""Tensor and sequence parallelism by hand, with a bug in it that PLANTED names."""

import os

import torch
import torch.distributed as dist
from torch import nn

mesh = {"dp": 2, "tp": 2}
PLANTED = os.environ.get("PLANTED", "norm")


class Gather(torch.autograd.Function):
    """Parts of the sequence -> the whole; backward sums and splits."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Scatter(torch.autograd.Function):
    """Partial sums of the whole sequence -> this rank's part of the sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size(), 1)[group.rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.group = None

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.tanh(self.up(h)))
        h = torch.tanh(self.up(Gather.apply(h, self.group)))
        partial = nn.functional.linear(h, self.down.weight)
        if PLANTED == "bias":  # every rank adds the whole of it, before the sum
            partial = partial + self.down.bias
            return x + Scatter.apply(partial, self.group)
        return x + Scatter.apply(partial, self.group) + self.down.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(8, 3)
        self.group = None

    def forward(self, x):
        x = self.enter(x)
        if self.group is not None:
            x = x.chunk(self.group.size(), 1)[self.group.rank()]
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def model():
    return Model()


def batch(step):
    return torch.randn(4, 6, 6), torch.randn(4, 6, 3)


def train_step(model, optimizer, batch, mesh):
    x, y = batch
    group = model.group
    if group is not None:
        y = y.chunk(group.size(), 1)[group.rank()]
    # A sum over the part, divided by the count of the whole: every reduction is a sum.
    count = batch[1].numel() * mesh["dp"].size()
    loss = (model(x) - y).square().sum() / count
    loss.backward()
    by_token = ("norm", "enter", "leave", "down.bias")
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        planted = PLANTED == "norm" and name.startswith("blocks.1.norm")
        if group is not None and any(part in name for part in by_token) and not planted:
            twice = PLANTED == "bias" and "down.bias" in name
            if not twice:
                dist.all_reduce(p.grad, group=group)
    optimizer.step()
    whole = loss.detach()
    if group is not None:
        dist.all_reduce(whole, group=group)
    return whole


loss_over_ranks = "sum"


def parallelize(model, mesh):
    group = mesh.get_group("tp")
    model.group = group
    tp, rank = group.size(), group.rank()
    for block in model.blocks:
        block.group = group
        for layer, dim in ((block.up, 0), (block.down, 1)):
            part = layer.weight.detach().chunk(tp, dim)[rank].clone()
            layer.weight = nn.Parameter(part)
        block.up.bias = nn.Parameter(block.up.bias.detach().chunk(tp)[rank].clone())
