"""How close samples are to data: the Fréchet distance between features of a classifier.

Source: Heusel et al., GANs Trained by a Two Time-Scale Update Rule, 2017; here the features are the
hidden layer of a small classifier of the data itself. Shapes: N samples, D numbers, H features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.fields.federate.ddm.protocols import FlowData

_HIDDEN = 48


@dataclass(frozen=True, eq=False)
class ClassifierFeatures:
    """The hidden layer of a classifier, and what it says of the data.

    Args:
        weights: [D, H].
        bias: [H].
        mean: of the data's features, [H].
        covariance: of the data's features, [H, H].
    """

    weights: np.ndarray
    bias: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, data: FlowData, seed: int = 0) -> ClassifierFeatures:
        """Train the classifier on data with labels."""
        network: Any = import_extra("sklearn.neural_network", extra="fields", purpose="features")
        model = network.MLPClassifier((_HIDDEN,), random_state=seed, max_iter=60, tol=0.0)
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that 60 passes are not the last word
            model.fit(data.x, data.y)
        weights, bias = model.coefs_[0], model.intercepts_[0]
        return cls(weights, bias, *moments(np.maximum(data.x @ weights + bias, 0)))

    def distance(self, x: np.ndarray) -> float:
        """Fréchet distance of samples [N, D] to the data."""
        mean, covariance = moments(np.maximum(x @ self.weights + self.bias, 0))
        return frechet(mean, covariance, self.mean, self.covariance)


def moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [H] and covariance [H, H] of features [N, H]."""
    return features.mean(0), np.cov(features, rowvar=False)


def frechet(
    mean: np.ndarray, covariance: np.ndarray, other_mean: np.ndarray, other: np.ndarray
) -> float:
    """|m - n|^2 + tr(A + B - 2 (A^1/2 B A^1/2)^1/2) of two normal distributions."""
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    both = np.linalg.eigvalsh(root @ other @ root)
    trace = np.trace(covariance) + np.trace(other) - 2 * np.sqrt(np.maximum(both, 0)).sum()
    return float(((mean - other_mean) ** 2).sum() + trace)
