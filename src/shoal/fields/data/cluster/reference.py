"""What the native functions of a swap search compute, in numpy: the oracle, and the fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shoal.fields.data.cluster.search import Floats, Ids, MedoidSearch

LEAST = 1e-13


def assign(search: MedoidSearch) -> None:
    """Nearest and second-nearest medoids, removal losses and the loss, from ``to``."""
    objects = np.arange(search.n)
    search.near[:] = search.to.argmin(axis=1)
    search.d1[:] = search.to[objects, search.near]
    others = search.to.copy()
    others[objects, search.near] = np.inf
    search.next[:] = others.argmin(axis=1)
    search.d2[:] = others[objects, search.next]
    search.loss = float(search.d1.sum(dtype=np.float64))
    gap = search.d2.astype(np.float64) - search.d1
    search.removal[:] = np.bincount(search.near, weights=gap, minlength=search.k)


def changes(search: MedoidSearch, row: Floats) -> npt.NDArray[np.float64]:
    """Float64 [k]: change of the loss if the candidate of ``row`` takes each medoid's place."""
    d, d1, d2 = (x.astype(np.float64) for x in (row, search.d1, search.d2))
    nearer = d < d1
    of_medoid = np.where(nearer, d1 - d2, np.minimum(d - d2, 0.0))
    shared = float((d - d1)[nearer].sum())
    added = np.bincount(search.near, weights=of_medoid, minlength=search.k)
    changes: npt.NDArray[np.float64] = search.removal + added + shared
    return changes


def apply_swap(search: MedoidSearch, place: int, candidate: int, row: Floats) -> None:
    """Put a candidate in the place of a medoid."""
    loss = search.loss
    search.is_medoid[search.medoids[place]] = 0
    search.is_medoid[candidate] = 1
    search.medoids[place] = candidate
    search.to[:, place] = row
    assign(search)
    search.loss = loss
    search.swaps += 1
    search.since = 0


def eager(search: MedoidSearch, rows: Floats, candidates: Ids, row_of: Ids, *, limit: int) -> int:
    """Take candidates in order, and make at once every swap that improves the loss."""
    for at, (candidate, place) in enumerate(zip(candidates, row_of, strict=True)):
        if search.since >= limit:
            return at
        result = changes(search, rows[place])
        partner = int(result.argmin())
        if search.is_medoid[candidate] or not result[partner] < -LEAST * search.loss:
            search.since += 1
            continue
        search.loss += float(result[partner])
        apply_swap(search, partner, int(candidate), rows[place])
    return len(candidates)


def best_swap(
    search: MedoidSearch,
    rows: Floats,
    candidates: Ids,
    *,
    best: tuple[float, int, int, int] = (0.0, -1, -1, -1),
) -> tuple[float, int, int, int]:
    """The swap that improves the loss most, of these candidates and of ``best``."""
    for at, candidate in enumerate(candidates):
        if not search.is_medoid[candidate]:
            result = changes(search, rows[at])
            partner = int(result.argmin())
            if result[partner] < best[0]:
                best = float(result[partner]), partner, int(candidate), at
    return best


def gains(rows: Floats, nearest: Floats) -> npt.NDArray[np.float64]:
    """What each candidate would take off the loss as one more medoid."""
    less = nearest.astype(np.float64) - rows
    gains: npt.NDArray[np.float64] = np.maximum(less, 0.0).sum(axis=1)
    return gains


def expand(lower: Floats, n: int, first: int, out: Floats) -> None:
    """Rows from ``first`` on of a symmetric matrix kept as what is below its diagonal."""
    objects = np.arange(n)
    for at, row in enumerate(range(first, first + len(out))):
        high, low = np.maximum(objects, row), np.minimum(objects, row)
        kept = high != low
        out[at] = 0.0
        out[at, kept] = lower[(high * (high - 1) // 2 + low)[kept]]
