"""The map of clusters: distances on a plane are kept, objects are coloured by their clusters."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from shoal.fields.data.cluster.picture import cluster_map, plane_of
from shoal.fields.data.cluster.storage import Precomputed, Vectors


def test_a_plane_keeps_its_distances() -> None:
    X = np.random.default_rng(0).normal(size=(40, 2)) @ [[3.0, 1.0], [0.0, 0.5]]
    places = plane_of(cdist(X, X))
    assert cdist(places, places) == pytest.approx(cdist(X, X), abs=1e-6)
    assert plane_of(cdist(X, X)) == pytest.approx(places)


def test_a_map_names_the_largest_clusters_and_the_others() -> None:
    X = np.random.default_rng(1).normal(size=(90, 3))
    labels = np.repeat(np.arange(9), 10)
    labels[:30] = 0
    text = cluster_map(Vectors(X), labels, seed=0)
    assert "90 of 90 objects" in text
    assert ">0 (30)<" in text and ">others<" in text and ">8 (10)<" not in text
    assert text.count("<circle") >= 90


@pytest.mark.parametrize("n", [1, 2])
def test_a_map_of_few(n: int) -> None:
    objects = Precomputed(1.0 - np.eye(n))
    assert cluster_map(objects, np.zeros(n, np.int64), seed=0).startswith("<svg")
