"""Points of a collection, and what a search finds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.fields.retrieve.index.protocols import VectorIndexError

PUBLIC = ""
"""The tenant of points for which none is named."""

_PAYLOAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Point:
    """A vector with its attributes.

    Args:
        id: whole number from 0 on.
        vector: numbers, as many as the collection's ``dim``.
        payload: name -> JSON.
        tenants: who may see it.
    """

    id: int
    vector: Sequence[float] | np.ndarray
    payload: Mapping[str, Any] = field(default_factory=dict)
    tenants: tuple[str, ...] = (PUBLIC,)


@dataclass(frozen=True)
class ScoredPoint:
    """What a search found.

    Args:
        id: of the point.
        score: similarity, or the distance with ``l2``.
        payload: of the point.
    """

    id: int
    score: float
    payload: Mapping[str, Any]


def checked_payload(payload: Mapping[str, Any], point: int) -> dict[str, Any]:
    """A payload as it is kept.

    Args:
        payload: of a point.
        point: its id, for errors.

    Raises:
        VectorIndexError: it is no JSON, has numbers that are not finite, or is too large.
    """
    try:
        text = json.dumps(dict(payload), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise VectorIndexError(f"point {point}: payload: {cause}") from cause
    if len(text) > _PAYLOAD_BYTES:
        raise VectorIndexError(
            f"point {point}: payload: {len(text)} bytes; at most {_PAYLOAD_BYTES}"
        )
    kept: dict[str, Any] = json.loads(text)
    return kept


def score_of(distance: float, metric: str) -> float:
    """The score of a distance."""
    return math.sqrt(max(distance, 0.0)) if metric == "l2" else -distance
