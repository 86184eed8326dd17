"""R-MAT graphs: skewed like the graphs of people and pages, and made in a moment.

Source: Chakrabarti, Zhan, Faloutsos, R-MAT: A Recursive Model for Graph Mining, 2004; the
probabilities are those of Graph500.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array

from shoal.core.errors import require
from shoal.core.random import generator

GRAPH500 = (0.57, 0.19, 0.19, 0.05)


def rmat(
    scale: int,
    edge_factor: float = 8,
    *,
    probabilities: tuple[float, float, float, float] = GRAPH500,
    seed: int = 0,
) -> csr_array:
    """A directed graph of 2^scale nodes, [N, N], each edge once, weights in [0.5, 1.5).

    Each edge chooses a quarter of the matrix, and a quarter of that, ``scale`` times.

    Args:
        scale: 1 to 27.
        edge_factor: edges drawn, per node; those drawn twice are one.
        probabilities: of the quarters: upper left, upper right, lower left, lower right.
        seed: the same gives the same graph.

    Raises:
        ConfigError: the scale is out of range, or the probabilities are none.
    """
    require(1 <= scale <= 27, "rmat.scale", scale, expected="1 to 27")
    require(edge_factor > 0, "rmat.edge_factor", edge_factor, expected="above 0")
    require(
        min(probabilities) >= 0 and abs(sum(probabilities) - 1) < 1e-6,
        "rmat.probabilities",
        probabilities,
        expected="four numbers of 0 or more that add up to 1",
    )
    size, edges = 1 << scale, max(1, int(edge_factor * (1 << scale)))
    random = generator(seed, purpose="rmat")
    limits = np.cumsum(probabilities)[:3]
    row_E, col_E = np.zeros(edges, dtype=np.int64), np.zeros(edges, dtype=np.int64)
    for _ in range(scale):
        quarter_E = np.searchsorted(limits, random.random(edges), side="right")
        row_E, col_E = 2 * row_E + (quarter_E >> 1), 2 * col_E + (quarter_E & 1)
    place_E = np.unique(row_E * size + col_E)
    weight_E = random.random(place_E.size) + 0.5
    ends = tuple(part.astype(np.int32) for part in (place_E // size, place_E % size))
    return coo_array((weight_E, ends), shape=(size, size)).tocsr()


def grid(edge: int) -> csr_array:
    """The 5-point operator of a square grid of edge^2 points, [N, N]: 4 and -1."""
    require(edge >= 1, "grid.edge", edge, expected="1 or more")
    point = np.arange(edge * edge).reshape(edge, edge)
    pairs = [(point, point, 4.0)]
    for one, other in ((point[1:], point[:-1]), (point[:, 1:], point[:, :-1])):
        pairs += [(one, other, -1.0), (other, one, -1.0)]
    row = np.concatenate([a.ravel() for a, _, _ in pairs])
    col = np.concatenate([b.ravel() for _, b, _ in pairs])
    value = np.concatenate([np.full(a.size, v) for a, _, v in pairs])
    made = coo_array((value, (row, col)), shape=(edge * edge, edge * edge)).tocsr()
    made.sort_indices()
    return made
