"""Vectors and ids as indexes take them, or one error that says what is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shoal.fields.retrieve.index.protocols import Metric, VectorIndexError


def checked_vectors(vectors: Any, dim: int, metric: Metric) -> np.ndarray:
    """Vectors, float32 [N, dim], contiguous; of length 1 for ``cosine``.

    Args:
        vectors: [N, dim].
        dim: numbers of each.
        metric: of the index.

    Raises:
        VectorIndexError: another shape; numbers that are not finite; zeros under cosine.
    """
    try:
        rows = np.ascontiguousarray(vectors, np.float32)
    except (TypeError, ValueError) as cause:
        raise VectorIndexError(f"vectors: expected numbers [N, {dim}]: {cause}") from cause
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise VectorIndexError(f"vectors: {list(rows.shape)}; expected [N, {dim}]")
    if not math.isfinite(rows.sum()):  # or it is too large
        wrong = ~np.isfinite(rows).all(axis=1)
        if wrong.any():
            raise VectorIndexError(f"vectors: row {wrong.argmax()} has numbers that are not finite")
    if metric != "cosine":
        return rows
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not lengths.all():
        at = (lengths[:, 0] == 0).argmax()
        raise VectorIndexError(f"vectors: row {at} is zero, and has no direction for cosine")
    return np.ascontiguousarray(rows / lengths)


def checked_ids(ids: Any, *, repeated: bool = False) -> np.ndarray:
    """Ids, int64 [N], contiguous.

    Args:
        ids: [N] whole numbers, none below 0.
        repeated: one may come twice.

    Raises:
        VectorIndexError: they are not whole numbers from 0 to 2^63 - 1, or one comes twice.
    """
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise VectorIndexError("ids: expected whole numbers [N]")
    if given.size and (given.min() < 0 or int(given.max()) > np.iinfo(np.int64).max):
        raise VectorIndexError("ids: expected whole numbers from 0 to 2^63 - 1")
    names = np.ascontiguousarray(given, np.int64)
    if not repeated and len(np.unique(names)) < len(names):
        values, counts = np.unique(names, return_counts=True)
        raise VectorIndexError(f"ids: {values[counts > 1][0]} comes twice")
    return names
