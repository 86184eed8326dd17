"""Dividing a data set into clusters of about the same size: fine ones first, then theirs.

Features are principal components. k-means finds many fine clusters; their centres are then grouped
into K clusters, each of which takes no more samples than the tolerance allows.

Source: McAllister et al., Decentralized Diffusion Models, 2025, section 3.2, and Ma et al., CLIP
Data Experts via Clustering, 2024.

Shapes: N samples, D numbers, F fine clusters, K clusters.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.random import seed64
from shoal.fields.federate.protocols import FederationError

_ROUNDS = 10


def principal(x: np.ndarray, components: int) -> np.ndarray:
    """Principal components of samples [N, D], float64 [N, at most components]."""
    centred = x.astype(np.float64) - x.mean(0, dtype=np.float64)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    result: np.ndarray = centred @ vectors[:, ::-1][:, :components]
    return result


def balanced_clusters(
    x: np.ndarray,
    k: int,
    *,
    fine: int = 64,
    tolerance: float = 0.2,
    components: int = 16,
    seed: int = 0,
) -> np.ndarray:
    """The cluster of each sample, int64 [N].

    Args:
        x: samples [N, D].
        k: clusters.
        fine: fine clusters whose centres are grouped.
        tolerance: share by which a cluster may be larger than the mean, if the sizes of the fine
            clusters allow it.
        components: principal components that are compared.
        seed: of k-means.

    Raises:
        FederationError: a cluster would be empty.
    """
    if k == 1:
        return np.zeros(len(x), np.int64)
    if not k <= fine <= len(x):
        raise FederationError(
            f"partition: {k} clusters of {len(x)} samples through {fine} fine ones: a cluster "
            "would be empty; take clusters <= fine <= samples"
        )
    features = principal(x, components)
    labels, centres = _k_means(features, fine, None, seed)
    sizes = np.bincount(labels, minlength=fine)
    groups = _grouped(centres, sizes, k, (1 + tolerance) * len(x) / k, seed)
    result: np.ndarray = groups[labels]
    empty = np.flatnonzero(np.bincount(result, minlength=k) == 0)
    if len(empty):
        raise FederationError(
            f"partition: cluster {empty[0]} of {k} is empty: the samples have only "
            f"{len(np.unique(features, axis=0))} different features; take fewer clusters"
        )
    return result


def _k_means(
    points: np.ndarray, k: int, weights: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    cluster: Any = import_extra(
        "sklearn.cluster", extra="fields", purpose="dividing data by k-means"
    )
    state = seed64(seed, purpose="k-means", index=k) % 2**32
    fitted = cluster.KMeans(k, n_init=4, random_state=state).fit(points, sample_weight=weights)
    return fitted.labels_.astype(np.int64), fitted.cluster_centers_


def _grouped(centres: np.ndarray, sizes: np.ndarray, k: int, most: float, seed: int) -> np.ndarray:
    """The group of each fine cluster [F]: nearest with room, those with most to lose first."""
    _, middles = _k_means(centres, k, np.maximum(sizes, 1), seed)
    groups = np.full(len(centres), -1)
    for _ in range(_ROUNDS):
        before = groups.copy()
        distances = ((centres[:, None] - middles) ** 2).sum(-1)
        near = np.partition(distances, 1, axis=1)
        room = np.full(k, most)
        for at in np.argsort(near[:, 0] - near[:, 1], kind="stable"):
            order = np.argsort(distances[at], kind="stable")
            fitting = order[room[order] >= sizes[at]]
            groups[at] = fitting[0] if len(fitting) else room.argmax()
            room[groups[at]] -= sizes[at]
        for group in range(k):
            members = groups == group
            if sizes[members].sum():
                middles[group] = np.average(centres[members], 0, sizes[members])
        if (groups == before).all():
            break
    return groups
