"""A torch module as one flat vector that learns by SGD.

Parameters are views of one tensor and their gradients views of another, so loading a model and an
optimizer step are each one call over all of them. Buffers of floating point that a module saves,
such as the means of batch normalization, lie behind the parameters and are averaged with them. A
parameter that needs no gradient stays as it was made: it is no part of the vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.core.random import generator, seed64
from shoal.fields.federate.learn.protocols import Examples, LocalSettings
from shoal.fields.federate.protocols import LocalJob


def sequential(sizes: Sequence[int], activation: str = "relu") -> Callable[[], nn.Module]:
    """Makes linear layers with an activation between them; Xavier's initialization."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for at, (a, b) in enumerate(pairwise(sizes)):
            linear = nn.Linear(a, b)
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)
            layers.append(linear)
            if at < len(sizes) - 2:
                layers.append(nn.Tanh() if activation == "tanh" else nn.ReLU())
        return nn.Sequential(*layers)

    return make


def _travelling(module: nn.Module) -> dict[str, torch.Tensor]:
    """What is learned, by name: parameters that need gradients, then floating-point buffers."""
    saved = module.state_dict().keys()
    params = {name: one for name, one in module.named_parameters() if one.requires_grad}
    buffers = {
        name: one
        for name, one in module.named_buffers()
        if one.is_floating_point() and name in saved
    }
    return {**params, **buffers}


class TorchLearning:
    """A module that learns.

    Args:
        make: makes the module; its random numbers are torch's.

    Attributes:
        layout: name and shape of each tensor in the vector, parameters first.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._module = make()
        both = _travelling(self._module)
        self.layout = tuple((name, tuple(one.shape)) for name, one in both.items())
        self._params = sum(one.numel() for one in both.values() if isinstance(one, nn.Parameter))
        self._flat = torch.zeros(sum(one.numel() for one in both.values()))
        self._grad = torch.zeros(self._params)
        at = 0
        for one in both.values():
            view = self._flat[at : at + one.numel()].view(one.shape)
            view.copy_(one.detach())
            one.data = view
            if isinstance(one, nn.Parameter):
                one.grad = self._grad[at : at + one.numel()].view(one.shape)
            at += one.numel()

    @property
    def size(self) -> int:
        """Numbers of the vector."""
        return len(self._flat)

    def start(self, seed: int) -> np.ndarray:
        """Initialized from a seed, whatever else draws from torch's generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed64(seed, purpose="initial model"))
            tensors = _travelling(self._make()).values()
        return torch.cat([one.detach().reshape(-1) for one in tensors]).numpy().copy()

    def fit(
        self, model: np.ndarray, examples: Examples, job: LocalJob, settings: LocalSettings
    ) -> tuple[np.ndarray, float]:
        """SGD with momentum on random batches; with FedProx's term if it has a weight."""
        base = torch.from_numpy(model)
        self._flat.copy_(base)
        self._module.train()
        params, start = self._flat[: self._params], base[: self._params]
        velocity = torch.zeros_like(params)
        x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
        draw = generator(settings.seed, purpose="local batches", step=job.number)
        batch = min(settings.batch, len(examples))
        losses = []
        order: Any = np.empty(0, np.int64)
        for _ in range(job.steps):
            if len(order) < batch:
                order = draw.permutation(len(examples))
            rows, order = torch.from_numpy(order[:batch]), order[batch:]
            self._grad.zero_()
            loss = nn.functional.cross_entropy(
                self._module(x[rows]).flatten(0, -2), y[rows].flatten()
            )
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            with torch.no_grad():
                if settings.prox:
                    self._grad.add_(params - start, alpha=settings.prox)
                velocity.mul_(settings.momentum).add_(self._grad)
                params.add_(velocity, alpha=-settings.lr)
        mean = float(torch.stack(losses).mean()) if losses else 0.0
        return self._flat.numpy().copy(), mean

    def gradient(self, model: np.ndarray, examples: Examples) -> tuple[np.ndarray, float]:
        """Mean gradient float32 [P] of the loss of examples, 0 for buffers; and the mean loss."""
        self._flat.copy_(torch.from_numpy(model))
        self._module.train()
        self._grad.zero_()
        x, y = torch.from_numpy(examples.x), torch.from_numpy(examples.y)
        loss = nn.functional.cross_entropy(self._module(x).flatten(0, -2), y.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        result = np.zeros(self.size, np.float32)
        result[: self._params] = self._grad.numpy()
        return result, float(loss.detach())

    @torch.no_grad()
    def evaluate(self, model: np.ndarray, examples: Examples) -> dict[str, float]:
        """Mean loss and share of right answers."""
        self._flat.copy_(torch.from_numpy(model))
        self._module.eval()
        loss, right, count = 0.0, 0, 0
        for at in range(0, len(examples), 1024):
            x = torch.from_numpy(examples.x[at : at + 1024])
            y = torch.from_numpy(examples.y[at : at + 1024]).flatten()
            answers = self._module(x).flatten(0, -2)
            loss += float(nn.functional.cross_entropy(answers, y, reduction="sum"))
            right += int((answers.argmax(-1) == y).sum())
            count += len(y)
        return {"loss": loss / count, "accuracy": right / count}
