"""A map of nodes: their vectors on the plane on which they differ most, in colours of labels."""

from __future__ import annotations

import numpy as np

from shoal.core.random import generator
from shoal.core.svg import COLOURS, Chart, Series
from shoal.fields.graph.graph import NodeLabels

# Nodes that are drawn at most.
_DRAWN = 1500


def plane_of(vectors: np.ndarray) -> np.ndarray:
    """The first two principal components of vectors, float64 [n, 2]; their signs are fixed.

    Args:
        vectors: [n, d].
    """
    rows = np.asarray(vectors, np.float64) - vectors.mean(axis=0, dtype=np.float64)
    if min(rows.shape) < 2:
        return np.concatenate([rows[:, :1], np.zeros((len(rows), 1))], axis=1)
    _, axes = np.linalg.eigh(rows.T @ rows)
    places = rows @ axes[:, :-3:-1]
    largest = np.abs(places).argmax(axis=0)
    return np.asarray(places * np.where(places[largest, [0, 1]] < 0, -1.0, 1.0))


def node_map(vectors: np.ndarray, labels: NodeLabels | None, seed: int) -> str:
    """A picture of some nodes, those with the most frequent labels in colours of their own.

    Args:
        vectors: float32 [N, d].
        labels: of the nodes; the first of each is drawn.
        seed: of which nodes are drawn.
    """
    some = np.sort(generator(seed, purpose="map of nodes").permutation(len(vectors))[:_DRAWN])
    places = plane_of(vectors[some])
    first = np.full(len(some), -1)
    names: tuple[str, ...] = ()
    if labels is not None:
        known = np.flatnonzero(np.diff(labels.indptr)[some])
        first[known] = labels.indices[labels.indptr[some[known]]]
        names = labels.names
    counts = np.bincount(first[first >= 0], minlength=1)
    shown = [int(at) for at in np.argsort(-counts, kind="stable")[: len(COLOURS) - 1] if counts[at]]
    series = [
        Series(name=names[label], x=x, y=y, line=False, points=True)
        for label in shown
        for x, y in (places[first == label].T.tolist(),)
    ]
    others = ~np.isin(first, shown)
    if others.any():
        x, y = places[others].T.tolist()
        name = "others" if shown else "nodes"
        # Behind the others.
        series.insert(0, Series(name=name, x=x, y=y, line=False, points=True))
    return Chart(
        title=f"{len(some):,} of {len(vectors):,} nodes, by label",
        description="Nodes on the plane of the first two principal components of their vectors, in "
        "the colours of the most frequent labels.",
        x_label="first principal component",
        y_label="second principal component",
        series=series,
        height=480,
    ).render()
