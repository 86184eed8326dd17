"""Averaging that keeps the variance of weights.

The mean of k independent tensors has a k-th of their variance. Models that begin from different
random weights lose the scale that lets a deep network learn when they are averaged; here the mean
is stretched around its own mean to the variance that the models had.

Source: Vanishing Variance Problem in Fully Decentralized Neural-Network Systems, 2024.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.federate.gossip.averaging import PlainAverage, is_matrix

# Of the models' variance: a mean with less is left as it is.
_LEAST = 1e-12


@part
class VarianceCorrected(PlainAverage):
    """The mean, stretched to the variance that the models had; biases and norms are left alone.

    Args:
        scope: what has one variance: a whole ``tensor``, or each output ``channel`` of it.
        until: mean correlation of the models above which nothing is corrected any more.
    """

    scope: Literal["tensor", "channel"] = "tensor"
    until: Annotated[float, Gt(0), Le(1)] = 0.95

    def average(self, stack: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """W' = mean(W) + (W - mean(W)) sqrt(v / Var(W)) of the mean W, v the models' variance."""
        plain = super().average(stack, weights)
        k, shape = len(stack), stack.shape[1:]
        if k == 1 or not is_matrix(shape):
            return plain
        rows = 1 if self.scope == "tensor" else shape[0]
        wide = stack.astype(np.float64).reshape(k, rows, -1)
        if wide.shape[2] < 2:
            return plain
        mean = np.tensordot(weights, wide, axes=1)
        target = weights @ wide.var(axis=2)
        variance = mean.var(axis=1)
        # Where every weight is 1/k: the mean correlation of pairs of models.
        correlation = (k * variance.sum() / max(target.sum(), 1e-300) - 1) / (k - 1)
        if correlation > self.until:
            return plain
        alone = variance < _LEAST * target
        stretch = np.sqrt(np.divide(target, variance, out=np.ones(rows), where=~alone))
        centre = mean.mean(axis=1, keepdims=True)
        wanted = centre + (mean - centre) * stretch[:, None]
        result: np.ndarray = wanted.reshape(shape).astype(stack.dtype)
        return result
