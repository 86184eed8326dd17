"""Models that clients train with SGD: what they cost, and how they are made with torch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.federate.learn.protocols import Examples, Learning
from shoal.fields.federate.protocols import FederationError


@part
class Logistic:
    """Multinomial logistic regression."""

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """One matrix with a bias."""
        width = math.prod(features)
        return (width + 1) * classes, 6.0 * width * classes

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """A linear layer."""
        from shoal.fields.federate.learn.torch_learning import TorchLearning, sequential

        return TorchLearning(sequential([math.prod(features), classes]))

    def curvature(self, examples: Examples) -> tuple[float, float]:
        """0, and half of the largest eigenvalue of the second moments of the inputs and a 1.

        Source: Böhning, Multinomial Logistic Regression Algorithm, 1992.
        """
        x = examples.x.reshape(len(examples), -1).astype(np.float64)
        wide = np.hstack([x, np.ones((len(x), 1))])
        return 0.0, float(np.linalg.eigvalsh(wide.T @ wide / len(wide))[-1] / 2)


@part
class MlpLearner:
    """A multilayer perceptron.

    Args:
        width: of hidden layers.
        depth: hidden layers.
        activation: ``relu`` or ``tanh``.
    """

    width: Annotated[int, Ge(1)] = 64
    depth: Annotated[int, Ge(1)] = 2
    activation: str = "relu"

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Matrices with biases."""
        sizes = self._sizes(features, classes)
        pairs = list(pairwise(sizes))
        return sum((a + 1) * b for a, b in pairs), sum(6.0 * a * b for a, b in pairs)

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """Linear layers with Xavier's initialization."""
        from shoal.fields.federate.learn.torch_learning import TorchLearning, sequential

        if self.activation not in ("relu", "tanh"):
            raise FederationError(f"learner: activation {self.activation!r}; expected relu or tanh")
        return TorchLearning(sequential(self._sizes(features, classes), self.activation))

    def _sizes(self, features: tuple[int, ...], classes: int) -> list[int]:
        return [math.prod(features), *[self.width] * self.depth, classes]


@part
class CnnDigits:
    """Two convolutions and two linear layers, for small images.

    Args:
        channels: of the first convolution; the second has twice as many.
        hidden: width of the first linear layer.
    """

    channels: Annotated[int, Ge(1)] = 16
    hidden: Annotated[int, Ge(1)] = 100

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Convolutions at every pixel, and two matrices at half the size."""
        deep, high, wide = _image(features)
        a, b, h = self.channels, 2 * self.channels, self.hidden
        flat = b * (high // 2) * (wide // 2)
        size = (9 * deep + 1) * a + (9 * a + 1) * b + (flat + 1) * h + (h + 1) * classes
        flops = high * wide * 9 * (deep * a + a * b) + flat * h + h * classes
        return size, 6.0 * flops

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """With ReLU and one pooling."""
        import torch
        from torch import nn

        from shoal.fields.federate.learn.torch_learning import TorchLearning

        deep, high, wide = _image(features)
        a, b, h = self.channels, 2 * self.channels, self.hidden

        def make() -> Any:
            return nn.Sequential(
                nn.Conv2d(deep, a, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(a, b, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(b * (high // 2) * (wide // 2), h),
                nn.ReLU(),
                nn.Linear(h, classes),
            )

        assert torch.get_default_dtype() == torch.float32
        return TorchLearning(make)


def _image(features: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width.

    Raises:
        FederationError: the examples are no images.
    """
    if len(features) != 3:
        raise FederationError(
            f"learner: examples of shape {list(features)} are not images; use logistic or mlp"
        )
    return features[0], features[1], features[2]
