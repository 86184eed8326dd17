"""Linear regression in numpy, in double precision: data of a known condition, and a learner."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.learn.protocols import Examples, Learning, LocalSettings
from shoal.fields.federate.learn.sources import held_out
from shoal.fields.federate.protocols import FederationError, LocalJob


@part
class Regression:
    """Linear regression whose owners have different coefficients; the last feature is the target.

    Args:
        owners: each with coefficients of its own.
        rows: examples of an owner.
        features: of an example, besides the target.
        drift: how far an owner's coefficients are from the common ones, which have deviation 1.
        spread: largest variance of a feature over the smallest.
        noise: standard deviation of the target around its mean.
    """

    owners: Annotated[int, Ge(1)] = 10
    rows: Annotated[int, Ge(2)] = 200
    features: Annotated[int, Ge(1)] = 10
    drift: Annotated[float, Ge(0)] = 0.3
    spread: Annotated[float, Ge(1)] = 60.0
    noise: Annotated[float, Ge(0)] = 0.1

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Examples float64 [owners * rows, features + 1], of which a tenth is held out."""
        draw = generator(seed, purpose="linear regression")
        scale = np.sqrt(np.geomspace(1.0, self.spread, self.features))
        x = draw.standard_normal((self.owners, self.rows, self.features)) * scale
        common = draw.standard_normal(self.features)
        true = common + self.drift * draw.standard_normal((self.owners, self.features))
        y = np.einsum("orf,of->or", x, true) + self.noise * draw.standard_normal(x.shape[:2])
        count = self.owners * self.rows
        whole = Examples(
            x=np.concatenate([x, y[..., None]], axis=2).reshape(count, -1),
            y=np.zeros(count, np.int64),
            classes=1,
            owner=np.repeat(np.arange(self.owners), self.rows),
        )
        return held_out(whole, 0.1, seed)


@part
class LeastSquares:
    """Linear regression without a constant; the last feature is the target."""

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """A coefficient for each feature but the last."""
        return features[0] - 1, 4.0 * (features[0] - 1)

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """In numpy."""
        if len(features) != 1 or features[0] < 2:
            raise FederationError(
                f"learner: least_squares with examples {list(features)}; it needs rows of at least "
                "two numbers, of which the last is the target, such as data = regression"
            )
        return LeastSquaresLearning(features[0] - 1)

    def curvature(self, examples: Examples) -> tuple[float, float]:
        """The outer eigenvalues of twice the second moments."""
        x = examples.x[:, :-1].astype(np.float64)
        values = np.linalg.eigvalsh(2 * x.T @ x / len(x))
        return float(values[0]), float(values[-1])


class LeastSquaresLearning:
    """The mean of the squared residuals, and its gradient.

    Args:
        size: coefficients.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.layout: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (size,)),)

    @property
    def size(self) -> int:
        """Coefficients."""
        return self._size

    def start(self, seed: int) -> np.ndarray:
        """Normal, float64 [P]."""
        return generator(seed, purpose="initial model").standard_normal(self._size)

    def fit(
        self, model: np.ndarray, examples: Examples, job: LocalJob, settings: LocalSettings
    ) -> tuple[np.ndarray, float]:
        """SGD with momentum on random batches, in the precision of the model."""
        draw = generator(settings.seed, purpose="local batches", step=job.number)
        batch = min(settings.batch, len(examples))
        now, velocity, losses = model.copy(), np.zeros_like(model), []
        for _ in range(job.steps):
            # All examples in their order, if that is what a batch is.
            whole = batch == len(examples)
            rows = slice(None) if whole else draw.choice(len(examples), batch, replace=False)
            x, y = examples.x[rows, :-1], examples.x[rows, -1]
            residual = x @ now - y
            losses.append(float(residual @ residual) / batch)
            gradient = x.T @ residual * (2 / batch) + settings.prox * (now - model)
            velocity = settings.momentum * velocity + gradient
            now = now - settings.lr * velocity
        return now.astype(model.dtype), float(np.mean(losses or [0.0]))

    def evaluate(self, model: np.ndarray, examples: Examples) -> dict[str, float]:
        """``loss``, and as ``accuracy`` the share of the variance that is explained."""
        x, y = examples.x[:, :-1], examples.x[:, -1]
        loss = float(((x @ model - y) ** 2).mean())
        return {"loss": loss, "accuracy": max(0.0, 1 - loss / float(y.var()))}
