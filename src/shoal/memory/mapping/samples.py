"""The eight programs that mappers are held against: five small models, traced, and three more."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.memory.mapping.trace import Speed, TracedProgram, trace
from shoal.plan.mapping.program import MappingProgram
from shoal.plan.mapping.samples import random_program, strassen

# A processor of 1 TFLOP/s behind 20 GB/s: many operators wait for memory, products do not.
SPEED = Speed(matmul_flops=1e12, vector_flops=1e11)


class _Attention(nn.Module):
    """Attention with heads, a residual and a norm."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        q, k, v = self.qkv(self.norm(x_BTD)).chunk(3, -1)
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mixed = scores.softmax(-1) @ v
        result: Tensor = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class _ViT(nn.Module):
    """A block of a vision transformer behind its patches."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.attention = _Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.attention(self.patches(x_BCHW).flatten(2).transpose(1, 2))
        result: Tensor = self.head((x_BTD + self.mlp(self.norm(x_BTD))).mean(1))
        return result


class _Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.first = nn.BatchNorm2d(out)
        self.two = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.second = nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.two(self.first(self.one(x)).relu()))
        result: Tensor = (inner + self.skip(x)).relu()
        return result


class _ResNet(nn.Module):
    """Three residual blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(
            _Residual(16, 16, 1), _Residual(16, 32, 2), _Residual(32, 64, 2)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x).relu()).mean((2, 3)))
        return result


class _LSTM(nn.Module):
    """An LSTM cell, unrolled."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * width, 4 * width)
        self.width = width

    def forward(self, x_TBD: Tensor) -> Tensor:
        h = c = torch.zeros(x_TBD.shape[1], self.width)
        for x_BD in x_TBD:
            i, f, g, o = self.cell(torch.cat([x_BD, h], -1)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for wide in (256, 512, 256, 512, 256, 128):
        layers += [nn.LazyLinear(wide), nn.GELU()]
    return nn.Sequential(*layers, nn.LazyLinear(10))


MODELS = ("mlp", "attention", "resnet", "lstm", "vit")


def sample(name: str, *, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """One of :data:`MODELS` with random weights, and inputs for it."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        made: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
            "mlp": lambda: (_mlp(), torch.randn(64, 256)),
            "attention": lambda: (_Attention(), torch.randn(4, 64, 128)),
            "resnet": lambda: (_ResNet(), torch.randn(4, 3, 32, 32)),
            "lstm": lambda: (_LSTM(), torch.randn(8, 32, 128)),
            "vit": lambda: (_ViT(), torch.randn(4, 3, 32, 32)),
        }
        model, given = made[name]()
        with torch.no_grad():
            model.eval()(given)  # gives lazy layers their shapes
    return model, (given,)


def traced_sample(name: str, *, seed: int = 0) -> TracedProgram:
    """One of :data:`MODELS`, traced."""
    model, inputs = sample(name, seed=seed)
    return trace(model, inputs, name=name, speed=SPEED)


def samples() -> tuple[MappingProgram, ...]:
    """All eight programs."""
    return (
        *(traced_sample(name).program for name in MODELS),
        strassen(matmul_flops=SPEED.matmul_flops, vector_flops=SPEED.vector_flops),
        random_program(60, seed=1),
        random_program(100, seed=2),
    )
