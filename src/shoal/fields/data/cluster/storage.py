"""Dissimilarities of objects, computed or given; kept whole, halved, or not at all.

BLAS computes Euclidean distances and cosines, in double precision and by blocks of rows, so that
what is kept in float32 is right to its last digit; other metrics are those of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.sizes import human_bytes
from shoal.fields.data.cluster.protocols import ClusterError
from shoal.fields.data.cluster.search import Floats, Ids, expand

Storage: TypeAlias = Literal["full32", "condensed", "on_demand"]
STORAGES: tuple[Storage, ...] = ("full32", "condensed", "on_demand")
Metric: TypeAlias = str | Callable[[Any, Any], float]

# Numbers of one block of rows: 16 MB, which most last levels of cache hold.
_BLOCK = 4_000_000
_TOLERANCE = 1e-5


class Objects(Protocol):
    """Objects between which there are dissimilarities."""

    n: int

    def between(self, a: Ids | slice, b: Ids | slice) -> Floats:
        """Float32 [len(a), len(b)]: dissimilarity of each of ``b`` to each of ``a``."""

    def subset(self, ids: Ids) -> Objects:
        """Only these objects, in this order."""


class Vectors:
    """Objects that are rows of a matrix.

    Args:
        X: [n, d], dense or sparse, finite.
        metric: ``euclidean``, ``sqeuclidean``, ``cosine``, or any of scikit-learn; or a function of
            two rows.

    Raises:
        ClusterError: a sparse matrix with a function; a metric that there is not.
    """

    def __init__(self, X: Any, metric: Metric = "euclidean") -> None:
        self.n = int(X.shape[0])
        self.metric = metric
        self._sparse = hasattr(X, "tocsr")
        if self._sparse and callable(metric):
            raise ClusterError(
                "metric: a function, with sparse X: a function is given dense rows; give a dense "
                "X, or the name of a metric"
            )
        self._fast = not self._sparse and metric in ("euclidean", "sqeuclidean", "cosine")
        self._X = X if self._sparse else np.ascontiguousarray(X)
        if not self._fast:
            if isinstance(metric, str):
                _check_name(metric)
            return
        X = np.asarray(X, np.float64)
        if metric == "cosine":
            norms = np.linalg.norm(X, axis=1)
            self._ready = X / np.where(norms, norms, 1.0)[:, None]
        else:
            # The origin in their middle costs the squares the fewest digits.
            self._ready = X - X.mean(axis=0)
            self._squares = np.einsum("ij,ij->i", self._ready, self._ready)

    def between(self, a: Ids | slice, b: Ids | slice) -> Floats:
        """Float32 [len(a), len(b)] of dissimilarities.

        Raises:
            ClusterError: the metric refuses the vectors.
        """
        if not self._fast:
            pairwise = import_extra(
                "sklearn.metrics", extra="fields", purpose=f"the metric {self.metric!r}"
            ).pairwise_distances
            try:
                result = pairwise(self._X[a], self._X[b], metric=self.metric)
            except (TypeError, ValueError) as cause:
                raise ClusterError(f"metric = {self.metric!r}: {cause}") from cause
            return np.ascontiguousarray(result, np.float32)
        product = self._ready[a] @ self._ready[b].T
        if self.metric == "cosine":
            np.subtract(1.0, product, out=product)
            return np.ascontiguousarray(np.maximum(product, 0.0), np.float32)
        product *= -2.0
        product += self._squares[a, None]
        product += self._squares[None, b]
        # What cancellation leaves of equal vectors is no distance.
        product[product < 1e-14 * (self._squares.max() + 1e-300)] = 0.0
        if self.metric == "euclidean":
            np.sqrt(product, out=product)
        return np.ascontiguousarray(product, np.float32)

    def subset(self, ids: Ids) -> Vectors:
        """Only these objects."""
        return Vectors(self._X[ids], self.metric)

    def rows(self) -> Any:
        """The matrix [n, d]."""
        return self._X


def _check_name(metric: str) -> None:
    names = import_extra(
        "sklearn.metrics.pairwise", extra="fields", purpose=f"the metric {metric!r}"
    )
    known = sorted(names._VALID_METRICS)
    if metric not in known:
        raise ClusterError(
            f"metric = {metric!r}: expected precomputed, or one of {', '.join(known)}"
        )


class Precomputed:
    """Objects whose dissimilarities are given.

    Args:
        D: [n, n], finite; D[o, c] is the dissimilarity of object o to medoid c.
        symmetric: refuse a matrix that is not.

    Raises:
        ClusterError: not square, not finite, or not symmetric.
    """

    def __init__(self, D: Any, *, symmetric: bool = True) -> None:
        D = np.asarray(D)
        if D.ndim != 2 or D.shape[0] != D.shape[1]:
            raise ClusterError(
                f"precomputed: a matrix of shape {D.shape}: expected a square one, the "
                "dissimilarity of every object to every other"
            )
        for rows in _blocks(len(D), len(D)):
            if not np.isfinite(D[rows]).all():
                where = rows.start + int(np.argwhere(~np.isfinite(D[rows]))[0][0])
                raise ClusterError(
                    f"precomputed: row {where} has NaN or infinity: every dissimilarity must be a "
                    "finite number"
                )
            scale = float(np.abs(D[rows]).max(initial=0.0)) or 1.0
            apart = np.abs(D[rows] - D[:, rows].T) if symmetric else np.zeros((1, 1))
            if apart.max(initial=0.0) > _TOLERANCE * scale:
                i, j = np.unravel_index(int(apart.argmax()), apart.shape)
                i += rows.start
                raise ClusterError(
                    f"precomputed: not symmetric: D[{i}, {j}] = {D[i, j]:g} and D[{j}, {i}] = "
                    f"{D[j, i]:g}; give a symmetric matrix, or symmetric=False, which reads "
                    "D[o, c] as the dissimilarity of o to medoid c"
                )
        self.n, self.symmetric = len(D), symmetric
        # A row is read for each candidate, so a candidate's dissimilarities must lie in a row.
        self._D: Floats = np.ascontiguousarray(D if symmetric else D.T, np.float32)

    def between(self, a: Ids | slice, b: Ids | slice) -> Floats:
        """Float32 [len(a), len(b)] of dissimilarities."""
        if isinstance(a, slice) or isinstance(b, slice):
            floats: Floats = self._D[a][:, b]
            return floats
        return self._D[np.ix_(a, b)]

    def subset(self, ids: Ids) -> Precomputed:
        """Only these objects."""
        small = object.__new__(Precomputed)
        small.n, small.symmetric = len(ids), self.symmetric
        small._D = self._D[np.ix_(ids, ids)]
        return small

    @property
    def whole(self) -> Floats:
        """All of it, without a copy."""
        return self._D


def _blocks(n: int, width: int) -> Iterator[slice]:
    step = max(1, min(n, _BLOCK // max(width, 1)))
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


class DissimilarityRows(Protocol):
    """Rows of dissimilarities, however they are kept."""

    n: int

    @property
    def whole(self) -> Floats | None:
        """All rows, where they are kept; else None."""

    def rows(self, first: int, count: int) -> Floats:
        """Float32 [count, n] from row ``first`` on; valid until the next call."""

    def some(self, ids: Ids) -> Floats:
        """Float32 [len(ids), n] of any rows; a copy."""

    def blocks(self) -> Iterator[slice]:
        """All rows, in blocks that are good to ask for."""


class Matrix:
    """All of them in float32: 4 n² bytes.

    Args:
        watch: called with the share that is computed.
    """

    def __init__(self, objects: Objects, watch: Callable[[float], None] | None = None) -> None:
        self.n = objects.n
        if isinstance(objects, Precomputed):
            self.whole: Floats = objects.whole
            return
        kept = np.empty((self.n, self.n), np.float32)
        for rows in _blocks(self.n, self.n):
            kept[rows, rows.start :] = objects.between(rows, slice(rows.start, None))
            kept[rows.start :, rows] = kept[rows, rows.start :].T
            if watch is not None:
                watch(1.0 - (1.0 - rows.stop / self.n) ** 2)
        np.fill_diagonal(kept, 0.0)
        self.whole = kept

    def rows(self, first: int, count: int) -> Floats:
        """A view."""
        return self.whole[first : first + count]

    def some(self, ids: Ids) -> Floats:
        """A copy."""
        return self.whole[ids]

    def blocks(self) -> Iterator[slice]:
        """Blocks that take some hundredths of a second."""
        return _blocks(self.n, max(1, self.n // 16))


class Condensed:
    """What lies below the diagonal, in float32: 2 n² bytes.

    Args:
        watch: called with the share that is computed.
    """

    whole = None

    def __init__(self, objects: Objects, watch: Callable[[float], None] | None = None) -> None:
        n = self.n = objects.n
        self._lower = np.empty(n * (n - 1) // 2, np.float32)
        for rows in _blocks(n, n):
            piece = objects.between(rows, slice(0, rows.stop))
            for at, row in enumerate(range(rows.start, rows.stop)):
                begin = row * (row - 1) // 2
                self._lower[begin : begin + row] = piece[at, :row]
            if watch is not None:
                watch((rows.stop / n) ** 2)
        self._room = np.empty((next(self.blocks()).stop, n), np.float32)

    def rows(self, first: int, count: int) -> Floats:
        """Written into a buffer."""
        rows: Floats = self._room[:count]
        expand(self._lower, self.n, first, rows)
        return rows

    def some(self, ids: Ids) -> Floats:
        """Each expanded alone."""
        array = np.empty((len(ids), self.n), np.float32)
        for at, row in enumerate(ids):
            expand(self._lower, self.n, int(row), array[at : at + 1])
        return array

    def blocks(self) -> Iterator[slice]:
        """Blocks of a few lines of cache in width."""
        return _blocks(self.n, max(self.n, _BLOCK // 128))


class OnDemand:
    """None of them: rows are computed whenever they are read.

    Args:
        watch: never called.
    """

    whole = None

    def __init__(self, objects: Objects, watch: Callable[[float], None] | None = None) -> None:
        self._objects = objects
        self.n = objects.n

    def rows(self, first: int, count: int) -> Floats:
        """Computed, as a block."""
        result = np.ascontiguousarray(
            self._objects.between(slice(first, first + count), slice(None))
        )
        return self._zeroed(result, np.arange(first, first + count))

    def some(self, ids: Ids) -> Floats:
        """Computed, as a block."""
        result = np.ascontiguousarray(self._objects.between(ids, slice(None)))
        return self._zeroed(result, ids)

    def _zeroed(self, rows: Floats, ids: Ids) -> Floats:
        if not isinstance(self._objects, Precomputed):  # rounding leaves a little of no distance
            rows[np.arange(len(ids)), ids] = 0.0
        return rows

    def blocks(self) -> Iterator[slice]:
        """Blocks that BLAS is quick with."""
        return _blocks(self.n, max(self.n, _BLOCK // 256))


_KEPT: dict[Storage, type[Matrix | Condensed | OnDemand]] = {
    "full32": Matrix,
    "condensed": Condensed,
    "on_demand": OnDemand,
}


def kept(
    objects: Objects, storage: Storage, watch: Callable[[float], None] | None = None
) -> DissimilarityRows:
    """Rows of dissimilarities of objects, kept as ``storage`` says.

    Raises:
        ClusterError: there is not enough memory for them.
    """
    if storage == "condensed" and isinstance(objects, Precomputed) and not objects.symmetric:
        raise ClusterError(
            "storage = 'condensed': half of a matrix that is not symmetric is not enough; use "
            "full32 or on_demand"
        )
    try:
        dissimilarity_rows: DissimilarityRows = _KEPT[storage](objects, watch)
    except MemoryError as cause:
        raise ClusterError(
            f"storage = {storage!r}: {human_bytes(storage_bytes(storage, objects.n))} of "
            f"dissimilarities of {objects.n} objects do not fit in memory; use on_demand, or CLARA"
        ) from cause
    return dissimilarity_rows


def storage_bytes(storage: Storage, n: int) -> float:
    """Bytes of what is kept."""
    return {"full32": 4.0 * n * n, "condensed": 2.0 * n * (n - 1)}.get(storage, 4.0 * _BLOCK)
