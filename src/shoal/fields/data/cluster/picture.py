"""A map of clusters: objects on a plane, as far from each other as they are, in colours."""

from __future__ import annotations

import numpy as np

from shoal.core.random import generator
from shoal.core.svg import COLOURS, Chart, Series
from shoal.fields.data.cluster.search import Ids
from shoal.fields.data.cluster.storage import Objects

# Objects that are drawn at most; a symmetric matrix of them is decomposed.
_DRAWN = 1000


def plane_of(D: np.ndarray) -> np.ndarray:
    """Places on a plane whose distances are near those that are given: classical scaling.

    Source: Torgerson, Multidimensional scaling: I. Theory and method, 1952.

    Args:
        D: [n, n] dissimilarities, at least two objects.

    Returns:
        float64 [n, 2], columns by how much they explain; their signs are fixed.
    """
    squares = (np.asarray(D, np.float64) ** 2 + np.asarray(D, np.float64).T ** 2) / 2
    inner = -(squares - squares.mean(0) - squares.mean(1)[:, None] + squares.mean()) / 2
    values, vectors = np.linalg.eigh(inner)
    places = vectors[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0.0))
    largest = np.abs(places).argmax(axis=0)
    signs = np.where(places[largest, [0, 1]] < 0, -1.0, 1.0)
    return np.asarray(places * signs)


def cluster_map(objects: Objects, labels: Ids, seed: int) -> str:
    """A picture of some objects, those of the largest clusters in colours of their own.

    Args:
        objects: that were clustered.
        labels: int64 [n], the cluster of each; -1 of an object that has none.
        seed: of which objects are drawn.
    """
    draw = generator(seed, purpose="map of clusters")
    some = np.sort(draw.permutation(objects.n)[:_DRAWN])
    alone = len(some) < 2  # between whom nothing can be measured
    places = np.zeros((len(some), 2)) if alone else plane_of(objects.between(some, some))
    sizes = np.bincount(labels[labels >= 0])
    named = np.argsort(-sizes, kind="stable")[: len(COLOURS) - (len(sizes) > len(COLOURS))]
    series = [
        Series(
            name=f"{cluster} ({sizes[cluster]:,})",
            x=places[labels[some] == cluster, 0].tolist(),
            y=places[labels[some] == cluster, 1].tolist(),
            line=False,
            points=True,
        )
        for cluster in named.tolist()
    ]
    others = ~np.isin(labels[some], named)
    if others.any():
        x, y = places[others].T.tolist()
        series.append(Series(name="others", x=x, y=y, line=False, points=True))
    return Chart(
        title=f"{len(some):,} of {objects.n:,} objects, by cluster (objects)",
        description="Objects on the plane on which their distances are kept best, in the colours "
        "of the largest clusters.",
        x_label="first principal coordinate",
        y_label="second principal coordinate",
        series=series,
        height=480,
    ).render()
