"""Model-agnostic meta-learning of sine waves: a loss with gradients inside it.

`python maml.py`, or `torchrun --nproc-per-node 2 maml.py`.
"""

import math
import random

import torch
from torch import nn
from torch.func import functional_call, grad

import shoal


def task(seed):
    """Ten points of a wave to learn from, and ten to be judged by."""
    draw = random.Random(seed)
    height, shift = draw.uniform(0.5, 5.0), draw.uniform(0.0, math.pi)
    x = torch.tensor([[draw.uniform(-5.0, 5.0)] for _ in range(20)])
    y = height * torch.sin(x - shift)
    return x[:10], y[:10], x[10:], y[10:]


def collate(examples):
    return [torch.stack(column) for column in zip(*(task(seed) for seed in examples))]


def adapted(model, x, y):
    """The model's parameters after a step on one task."""
    parameters = dict(model.named_parameters())

    def error(parameters):
        return ((functional_call(model, parameters, (x,)) - y) ** 2).mean()

    slopes = grad(error)(parameters)
    return {name: p - 0.01 * slopes[name] for name, p in parameters.items()}


def loss(model, batch, train):
    losses = []
    for x, y, new_x, new_y in zip(*batch):
        result = functional_call(model, adapted(model, x, y), (new_x,))
        losses.append(((result - new_y) ** 2).mean())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    )
    trainer = shoal.Trainer(model, collate, loss, parallel="auto", batch=16)
    for row in trainer.fit(range(800), epochs=4, evaluate=range(10_000, 10_064)):
        print(row)
