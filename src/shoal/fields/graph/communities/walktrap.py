"""Walktrap: groups of a small weighted graph between which random walks seldom pass.

Source: Pons and Latapy, Computing Communities in Large Networks Using Random Walks, 2006.
"""

from __future__ import annotations

import numpy as np


def walktrap(weights: np.ndarray, *, steps: int = 4) -> np.ndarray:
    """The division of highest modularity among those that merging in turn gives.

    Neighbouring groups are merged whose union raises the mean squared distance of the vertices to
    their group least; the distance of two vertices is that of where walks from them end. Vertices
    without edges are groups of their own. As in the paper, each vertex has a loop, so that walks
    of even and of odd length end anywhere; its weight is the mean of the vertex's edges.

    Args:
        weights: float64 [n, n], symmetric, 0 or more, none on the diagonal.
        steps: of a walk.

    Returns:
        Int64 [n], groups numbered by their first vertex.
    """
    n = len(weights)
    group = np.arange(n)
    degrees = weights.sum(axis=1)
    total = degrees.sum()
    if not total:
        return group
    loops = np.where(degrees > 0, degrees / np.maximum((weights > 0).sum(axis=1), 1), 1.0)
    looped = weights + np.diag(loops)
    walked = looped.sum(axis=1)
    ends = np.linalg.matrix_power(looped / walked[:, None], steps) / np.sqrt(walked)
    sizes, alive = np.ones(n), degrees > 0
    between = weights.copy()  # weights of edges between groups
    inside = np.zeros(n)  # twice those within
    # What a merge costs: sizes' harmonic mean times the squared distance of the two, over 2 n.
    squares = (ends**2).sum(axis=1)
    cost = np.maximum(squares[:, None] + squares - 2 * ends @ ends.T, 0.0) / (4 * n)
    cost[~(between > 0)] = np.inf

    def modularity() -> float:
        volume = np.bincount(group, degrees, minlength=n)
        return float((inside.sum() / total) - ((volume / total) ** 2).sum())

    best, division = modularity(), group.copy()
    while alive.any() and np.isfinite(cost).any():
        a, b = sorted(np.unravel_index(int(cost.argmin()), cost.shape))
        size = sizes[a] + sizes[b]
        ends[a] = (sizes[a] * ends[a] + sizes[b] * ends[b]) / size
        inside[a] += inside[b] + 2 * between[a, b]
        inside[b], sizes[a], alive[b] = 0.0, size, False
        between[a] += between[b]
        between[:, a] = between[a]
        between[a, a] = 0.0
        between[b] = between[:, b] = 0.0
        group[group == b] = a
        cost[b] = cost[:, b] = np.inf
        near = np.flatnonzero((between[a] > 0) & alive)
        distance = ((ends[near] - ends[a]) ** 2).sum(axis=1)
        cost[a] = cost[:, a] = np.inf
        cost[a, near] = cost[near, a] = (
            sizes[a] * sizes[near] / (size + sizes[near]) * distance / (2 * n)
        )
        if (found := modularity()) > best + 1e-12:
            best, division = found, group.copy()
    return division
