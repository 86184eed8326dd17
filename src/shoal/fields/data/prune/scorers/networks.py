"""Small classifiers that are trained side by side, each with the same number of steps.

One hidden layer with rectified units, the cross entropy of a softmax, Adam. All models of an
ensemble are one array with a first axis of models, so that a step is a few products of stacks of
matrices. It needs no PyTorch.

Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.core.random import generator
from shoal.fields.data.prune.protocols import RowIds

BATCH = 64
HIDDEN = 32
_RATE, _BETA1, _BETA2, _EPSILON = 3e-3, 0.9, 0.999, 1e-8
# Numbers of an array of activations.
_BLOCK = 4_000_000

Floats = npt.NDArray[np.float32]

Seen = Callable[[RowIds, npt.NDArray[np.bool_]], None]
"""Called with the rows of each model's batch, and whether they were right before the step."""


class SmallNetworks:
    """Several classifiers with one hidden layer.

    Args:
        models: how many.
        dim: numbers of an example.
        classes: of the labels.
        hidden: units of the hidden layer.
        seed: of the weights and of the order of examples.
    """

    def __init__(
        self, models: int, dim: int, classes: int, *, hidden: int = HIDDEN, seed: int = 0
    ) -> None:
        self._draw = generator(seed, purpose="small networks")
        self.models, self.classes, self.hidden = models, classes, hidden

        def weights(rows: int, columns: int) -> Floats:
            drawn = self._draw.standard_normal((models, rows, columns))
            return np.asarray(drawn * np.sqrt(2 / rows), np.float32)

        def zeros(columns: int) -> Floats:
            return np.zeros((models, 1, columns), np.float32)

        self.parameters: list[Floats] = [
            weights(dim, hidden),
            zeros(hidden),
            weights(hidden, classes),
            zeros(classes),
        ]
        self._first = [np.zeros_like(one) for one in self.parameters]
        self._second = [np.zeros_like(one) for one in self.parameters]
        self.steps = 0

    def train(
        self,
        X: Floats,
        y: RowIds,
        *,
        steps: int,
        rows: RowIds | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Take so many steps, with batches of 64 in an order that each pass draws again.

        Args:
            X: float32 [n, d].
            y: int64 [n].
            steps: how many, the same for every model and every size of data.
            rows: int64 [models, m], the examples that each model learns from; None for all.
            seen: called with the result of each batch.
        """
        if rows is None:
            rows = np.broadcast_to(np.arange(len(X)), (self.models, len(X)))
        size = min(BATCH, rows.shape[1])
        order, at = rows, rows.shape[1]
        for _ in range(steps):
            if at + size > rows.shape[1]:
                order, at = self._draw.permuted(rows, axis=1), 0
            chosen = order[:, at : at + size]
            at += size
            right = self._step(X[chosen], y[chosen])
            if seen is not None:
                seen(chosen, right)

    def gradients(self, X: Floats, y: RowIds) -> tuple[list[Floats], npt.NDArray[np.bool_]]:
        """Gradients of the mean loss of a batch of each model, and which examples were right.

        Args:
            X: float32 [models, batch, d].
            y: int64 [models, batch].
        """
        w1, b1, w2, b2 = self.parameters
        hidden = np.maximum(X @ w1 + b1, 0)
        error = _softmax(hidden @ w2 + b2)
        right = error.argmax(axis=2) == y
        models, batch = y.shape
        error[np.arange(models)[:, None], np.arange(batch), y] -= 1
        error /= batch
        back = (error @ w2.transpose(0, 2, 1)) * (hidden > 0)
        return [
            X.transpose(0, 2, 1) @ back,
            back.sum(axis=1, keepdims=True),
            hidden.transpose(0, 2, 1) @ error,
            error.sum(axis=1, keepdims=True),
        ], right

    def _step(self, X: Floats, y: RowIds) -> npt.NDArray[np.bool_]:
        gradients, right = self.gradients(X, y)
        self.steps += 1
        rate = _RATE * np.sqrt(1 - _BETA2**self.steps) / (1 - _BETA1**self.steps)
        for value, first, second, gradient in zip(
            self.parameters, self._first, self._second, gradients, strict=True
        ):
            first += (1 - _BETA1) * (gradient - first)
            second += (1 - _BETA2) * (gradient**2 - second)
            value -= np.float32(rate) * first / (np.sqrt(second) + _EPSILON)
        return right

    def probabilities(self, X: Floats) -> Iterator[tuple[slice, Floats]]:
        """Float32 [models, rows, classes] of some rows at a time.

        Args:
            X: float32 [n, d].
        """
        w1, b1, w2, b2 = self.parameters
        rows = max(1, _BLOCK // (self.models * max(self.hidden, self.classes)))
        for first in range(0, len(X), rows):
            block = X[first : first + rows]
            hidden = np.maximum(block @ w1 + b1, 0)
            yield slice(first, first + len(block)), _softmax(hidden @ w2 + b2)

    def right(self, X: Floats, y: RowIds) -> npt.NDArray[np.bool_]:
        """Bool [models, n]: which examples each model gets right."""
        result = np.empty((self.models, len(X)), bool)
        for where, chances in self.probabilities(X):
            result[:, where] = chances.argmax(axis=2) == y[where]
        return result


def _softmax(logits: Any) -> Any:
    logits -= logits.max(axis=2, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=2, keepdims=True)
    return logits


def standardized(X: Floats, by: Floats | None = None) -> Floats:
    """Every column with mean 0 and deviation 1.

    Args:
        X: float32 [n, d].
        by: the examples that say what mean and deviation are; None for X itself.
    """
    by = X if by is None else by
    mean, deviation = by.mean(axis=0), by.std(axis=0)
    return np.asarray((X - mean) / np.where(deviation > 1e-12, deviation, 1.0), np.float32)


def training_macs(models: int, steps: int, rows: int, dim: int, classes: int) -> float:
    """Multiply-adds of training such networks (three products for each weight), and of one pass.

    Args:
        models: how many.
        steps: of each.
        rows: of the examples, of which each model is asked once.
        dim: numbers of an example.
        classes: of the labels.
    """
    weights = HIDDEN * (dim + classes)
    return float(models) * weights * (3.0 * steps * BATCH + rows)
