"""Parts of about equal size: k-means whose parts have a capacity."""

from __future__ import annotations

import math

import numpy as np

from shoal.core.random import generator

# Rows that centroids are learned from, for each part and at most.
_EACH, _SAMPLE = 512, 100_000
_ROUNDS = 10
_BLOCK = 65_536


def assign(apart: np.ndarray, capacity: int) -> np.ndarray:
    """The part of each row: the nearest one, or for rows that lose least by it, another.

    A part that has too many rows gives those away whose next part is the least farther; then it is
    full and receives no more, so the repair ends after as many steps as there are parts.

    Args:
        apart: float32 [N, P], squared distances from the centroids.
        capacity: most rows of a part; ``capacity * P`` is at least N.

    Returns:
        int32 [N].
    """
    labels: np.ndarray = apart.argmin(axis=1).astype(np.int32)
    while (counts := np.bincount(labels, minlength=apart.shape[1])).max() > capacity:
        part = int(counts.argmax())
        members = np.flatnonzero(labels == part)
        others = np.where(counts >= capacity, np.inf, apart[members])
        regret = others.min(axis=1) - apart[members, part]
        away = np.argpartition(regret, counts[part] - capacity - 1)[: counts[part] - capacity]
        labels[members[away]] = others[away].argmin(axis=1)
    return labels


def balanced_parts(rows: np.ndarray, parts: int, *, seed: int, slack: float = 0.1) -> np.ndarray:
    """The part of each row, int32 [N].

    Args:
        rows: [N, d], of any number type; may be memory-mapped, and is read in blocks.
        parts: how many, at most N.
        seed: of the sample and of the first centroids.
        slack: share by which a part may be larger than the average.
    """
    draw = generator(seed, purpose="osq parts")
    few = min(len(rows), _SAMPLE, _EACH * parts)
    sample = rows[np.sort(draw.choice(len(rows), few, replace=False))].astype(np.float32)
    centroids = _first(sample, parts, draw)
    for _ in range(_ROUNDS):
        labels = assign(_apart(sample, centroids), _capacity(few, parts, slack))
        for part in range(parts):
            mine = sample[labels == part]
            if len(mine):
                centroids[part] = mine.mean(axis=0)
    apart = np.empty((len(rows), parts), np.float32)
    for begin in range(0, len(rows), _BLOCK):
        block = rows[begin : begin + _BLOCK].astype(np.float32)
        apart[begin : begin + len(block)] = _apart(block, centroids)
    return assign(apart, _capacity(len(rows), parts, slack))


def _capacity(rows: int, parts: int, slack: float) -> int:
    return math.ceil(rows / parts * (1 + slack))


def _first(sample: np.ndarray, parts: int, draw: np.random.Generator) -> np.ndarray:
    """Rows far from each other, as k-means++ draws them."""
    chosen = [sample[draw.integers(len(sample))]]
    near = _apart(sample, chosen[0][None])[:, 0]
    while len(chosen) < parts:
        weights = near / near.sum() if near.sum() > 0 else None
        chosen.append(sample[draw.choice(len(sample), p=weights)])
        near = np.minimum(near, _apart(sample, chosen[-1][None])[:, 0])
    return np.array(chosen, np.float32)


def _apart(rows: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Squared distances, float32 [N, P], at least 0."""
    squares = np.einsum("nd,nd->n", rows, rows)[:, None] - 2 * (rows @ centroids.T)
    apart: np.ndarray = np.maximum(squares + np.einsum("pd,pd->p", centroids, centroids), 0)
    return apart
