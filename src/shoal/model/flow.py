"""A small network for flow matching: a velocity, or the logits of a router, of a noisy sample.

A sample x and noise e are joined by a path x_t = a(t) x + b(t) e with a(0) = b(1) = 1 and
a(1) = b(0) = 0; the network learns the velocity dx_t/dt. Along the straight path that is e - x
(rectified flow).

Sources: Lipman et al., Flow Matching for Generative Modeling, 2023; Liu et al., Flow Straight and
Fast, 2023; modulation by time as in Peebles and Xie, Scalable Diffusion Models with Transformers,
2023. Shapes: N samples, D numbers each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Sines and cosines of time.
_FREQUENCIES = 16


@dataclass(frozen=True)
class NoisePath:
    """How a sample becomes noise.

    Args:
        sample: t -> share of the sample, a(t).
        noise: t -> share of the noise, b(t).
        sample_rate: t -> da/dt.
        noise_rate: t -> db/dt.
    """

    sample: Callable[[Tensor], Tensor]
    noise: Callable[[Tensor], Tensor]
    sample_rate: Callable[[Tensor], Tensor]
    noise_rate: Callable[[Tensor], Tensor]

    def between(self, x: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy samples and their velocities, both [N, D], at times t [N]."""
        at = t[:, None]
        place = self.sample(at) * x + self.noise(at) * noise
        return place, self.sample_rate(at) * x + self.noise_rate(at) * noise


_QUARTER = math.pi / 2
PATHS: Mapping[str, NoisePath] = {
    "linear": NoisePath(
        lambda t: 1 - t, lambda t: t, lambda t: -torch.ones_like(t), torch.ones_like
    ),
    "cosine": NoisePath(
        lambda t: torch.cos(_QUARTER * t),
        lambda t: torch.sin(_QUARTER * t),
        lambda t: -_QUARTER * torch.sin(_QUARTER * t),
        lambda t: _QUARTER * torch.cos(_QUARTER * t),
    ),
}
"""The straight path, and one that keeps the variance."""


class _Block(nn.Module):
    """A residual layer that time scales and shifts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 2 * width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, h: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition).chunk(2, -1)
        normal = nn.functional.layer_norm(h, h.shape[-1:])
        inner = nn.functional.silu(self.up(normal * (1 + scale) + shift))
        output: Tensor = h + self.down(inner)
        return output


class FlowNetwork(nn.Module):
    """A residual network of a noisy sample, its time, and perhaps a label.

    Args:
        features: numbers of a sample, D.
        outputs: D for a velocity, the number of experts for a router.
        width: of the layers.
        depth: residual layers.
        classes: labels that it may be given; ``classes`` itself means no label. 0 for none.
        residual: the sample itself, times a function of time, is a part of the output, which is
            most of a velocity where noise is most of a sample.
    """

    rates: Tensor

    def __init__(
        self,
        features: int,
        outputs: int,
        *,
        width: int,
        depth: int,
        classes: int = 0,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.time = nn.Linear(2 * _FREQUENCIES, width)
        self.label = nn.Embedding(classes + 1, width) if classes else None
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, outputs)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        self.share = nn.Linear(width, 1) if residual else None
        rates = 2 * math.pi * 2.0 ** torch.linspace(-2, 4, _FREQUENCIES)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Outputs [N, outputs] of samples [N, D] at times [N], with labels int64 [N]."""
        angles = t[:, None] * self.rates
        condition = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        if self.label is not None:
            if labels is None:
                labels = torch.full((len(x),), self.label.num_embeddings - 1)
            condition = condition + self.label(labels)
        condition = nn.functional.silu(condition)
        h = self.enter(x)
        for block in self.blocks:
            h = block(h, condition)
        output: Tensor = self.leave(nn.functional.layer_norm(h, h.shape[-1:]))
        if self.share is not None:
            output = output + self.share(condition) * x
        return output
