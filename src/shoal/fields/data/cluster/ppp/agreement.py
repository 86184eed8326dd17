"""How far two partitions of weighted points agree.

Source: Hubert, Arabie, Comparing Partitions, 1985.
"""

from __future__ import annotations

import numpy as np

from shoal.fields.data.cluster.ppp.points import Ids


def adjusted_rand(a: Ids, b: Ids, weights: np.ndarray) -> float:
    """Adjusted Rand index; 1 for equal partitions."""
    ka, kb = int(a.max()) + 1, int(b.max()) + 1
    counts = np.bincount(a * kb + b, weights, ka * kb).reshape(ka, kb)
    return float(_adjusted(counts[None])[0])


def mean_adjusted_rand(labels_RM: Ids, weights: np.ndarray, k: int) -> float:
    """Mean adjusted Rand index of all pairs of R partitions into k."""
    R, M = labels_RM.shape
    columns = (labels_RM + k * np.arange(R)[:, None]).T
    one_hot = np.zeros((M, R * k))
    one_hot[np.arange(M)[:, None], columns] = 1.0
    tables = (one_hot.T @ (one_hot * weights[:, None])).reshape(R, k, R, k)
    first, second = np.triu_indices(R, 1)
    return float(_adjusted(tables[first, :, second]).mean()) if R > 1 else 1.0


def _adjusted(counts: np.ndarray) -> np.ndarray:
    """Of tables [T, A, B] of counts."""

    def pairs(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = x * (x - 1) / 2
        return result

    both = pairs(counts).sum(axis=(1, 2))
    a, b = pairs(counts.sum(axis=2)).sum(axis=1), pairs(counts.sum(axis=1)).sum(axis=1)
    expected = a * b / pairs(counts.sum(axis=(1, 2)))
    most = (a + b) / 2
    same = most == expected
    return np.where(same, 1.0, (both - expected) / np.where(same, 1.0, most - expected))
