"""Descriptors of photographs with uniform attributes, and what answers filtered queries of them.

Each query has ranges of its own. The baselines make their bitmap for each query, by one compiled
pass over plain columns, and then search; the quantised index does both in one call.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import and_
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.claims.lab.tenant_arms import ivf
from shoal.core.extras import import_extra
from shoal.core.native import build
from shoal.core.random import generator
from shoal.corpora.photos import photo_descriptors
from shoal.fields.retrieve.collections.filters import PointFilter, col
from shoal.fields.retrieve.index import OSQIndex

K, ATTRIBUTES = 10, 4
_FLAGS = ("-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-mprefer-vector-width=512")
_EFFORTS = [1.05**power for power in range(160)]


@dataclass(frozen=True)
class FilteredQuery:
    """A query with a range of each attribute.

    Args:
        query: float32 [d].
        low: float32 [attributes].
        high: float32 [attributes].
        where: the same ranges as an expression.
        nearest: squared distances of the true neighbours, ascending.
    """

    query: np.ndarray
    low: np.ndarray
    high: np.ndarray
    where: PointFilter
    nearest: np.ndarray


FilteredAnswer = Callable[[FilteredQuery, float], np.ndarray]
"""Ids of the nearest, of (query, effort)."""


class OSQSettings(NamedTuple):
    """How an index of :func:`tuned_osq` searches.

    Args:
        parts: of the index.
        beta: of its searches.
        keep: of them.
        rerank: of them.
    """

    parts: int
    beta: float
    keep: float
    rerank: float


@functools.cache
def _native() -> ctypes.CDLL:
    source = Path(__file__).with_name("filtered_scan.cpp").read_text("utf-8")
    library = build(source, name="filtered_scan", flags=_FLAGS)
    p, n = c_void_p, c_int64
    library.plain_filter.restype = library.plain_scan.restype = None
    library.plain_filter.argtypes = [p, n, n, p, p, p]
    library.plain_scan.argtypes = [p, n, p, n, p, n, p]
    return library


def _faiss() -> Any:
    faiss: Any = import_extra("faiss", extra="fields", purpose="the peers of the claim")
    faiss.omp_set_num_threads(1)
    return faiss


class FilteredPhotos:
    """Vectors, attributes, and queries of patches that are held out.

    Args:
        vectors: how many.
        selectivity: share of the vectors that pass a query's ranges, on average.
        seed: of all.
    """

    def __init__(self, vectors: int, selectivity: float, seed: int) -> None:
        self._held = max(200, vectors // 100)
        found = photo_descriptors(vectors + self._held, seed=seed).vectors
        self._queries = found[: self._held]
        self.vectors = np.ascontiguousarray(found[self._held :], np.float32)
        draw = generator(seed, purpose="attributes")
        self.values = draw.random((ATTRIBUTES, vectors), np.float32)
        self._width = selectivity ** (1 / ATTRIBUTES)

    def asked(self, count: int, seed: int) -> list[FilteredQuery]:
        """Queries with their truth."""
        draw, result = generator(seed, purpose="filtered queries"), []
        for at in draw.integers(0, self._held, count):
            query = self._queries[at]
            low = (draw.random(ATTRIBUTES) * (1 - self._width)).astype(np.float32)
            high = low + np.float32(self._width)
            there = (self.values >= low[:, None]) & (self.values <= high[:, None])
            rows = self.vectors[there.all(axis=0)]
            ranges = [
                col(f"a{j}").between(float(low[j]), float(high[j])) for j in range(ATTRIBUTES)
            ]
            apart = np.sort(((rows - query) ** 2).sum(axis=1))[:K]
            result.append(FilteredQuery(query, low, high, reduce(and_, ranges), apart))
        return result

    def recall(
        self, answer: FilteredAnswer, asked: Sequence[FilteredQuery], effort: float
    ) -> float:
        """The share of the true neighbours that an arm finds; all that it finds pass."""
        shares = []
        for one in asked:
            ids = answer(one, effort)
            ids = ids[ids >= 0]
            values = self.values[:, ids].T
            assert ((values >= one.low) & (values <= one.high)).all(), "rows that do not pass"
            apart = ((self.vectors[ids] - one.query) ** 2).sum(axis=1)
            found = int((apart <= one.nearest[-1] * (1 + 1e-5)).sum())
            shares.append(min(len(one.nearest), found) / len(one.nearest))
        return float(np.mean(shares))

    # Arms

    def osq(self, bits: float, parts: int, seed: int) -> OSQIndex:
        """Our index."""
        index = OSQIndex(bits, parts, seed=seed)
        index.build(self.vectors, attributes={f"a{j}": one for j, one in enumerate(self.values)})
        return index

    def bitmap(self, one: FilteredQuery) -> np.ndarray:
        """Bits of the rows that pass, by a compiled pass over plain columns."""
        count = len(self.vectors)
        bits = np.empty(-(-count // 8), np.uint8)
        _native().plain_filter(
            self.values.ctypes.data, count, ATTRIBUTES, one.low.ctypes.data, one.high.ctypes.data,
            bits.ctypes.data,
        )  # fmt: skip
        return bits

    def numpy_bitmap(self, one: FilteredQuery) -> np.ndarray:
        """The same by numpy."""
        is_in = np.ones(len(self.vectors), bool)
        for column, low, high in zip(self.values, one.low, one.high, strict=True):
            is_in &= column >= low
            is_in &= column <= high
        return np.packbits(is_in, bitorder="little")

    def scan(self) -> FilteredAnswer:
        """Every row that passes."""
        ids = np.empty(K, np.int64)

        def answer(one: FilteredQuery, effort: float) -> np.ndarray:
            bits, (count, dim) = self.bitmap(one), self.vectors.shape
            _native().plain_scan(
                bits.ctypes.data, count, self.vectors.ctypes.data, dim, one.query.ctypes.data, K,
                ids.ctypes.data,
            )  # fmt: skip
            return ids

        return answer

    def faiss_flat(self) -> FilteredAnswer:
        """Every row that passes, by faiss."""
        faiss = _faiss()
        index = faiss.IndexFlatL2(self.vectors.shape[1])
        index.add(self.vectors)

        def answer(one: FilteredQuery, effort: float) -> np.ndarray:
            chosen = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(self.bitmap(one)))
            ids: np.ndarray = index.search(one.query[None], K, params=chosen)[1][0]
            return ids

        return answer

    def faiss_ivf(self) -> FilteredAnswer:
        """IVFFlat with a bitmap; its effort is the number of cells that it visits."""
        faiss, index = _faiss(), ivf(self.vectors)

        def answer(one: FilteredQuery, effort: float) -> np.ndarray:
            chosen = faiss.SearchParametersIVF(
                sel=faiss.IDSelectorBitmap(self.bitmap(one)),
                nprobe=min(index.nlist, round(effort)),
            )
            ids: np.ndarray = index.search(one.query[None], K, params=chosen)[1][0]
            return ids

        return answer


def osq_arm(index: OSQIndex, settings: OSQSettings) -> FilteredAnswer:
    """The index with these settings."""
    _, beta, keep, rerank = settings

    def answer(one: FilteredQuery, effort: float) -> np.ndarray:
        ids: np.ndarray = index.search(
            one.query, K, where=one.where, beta=beta, keep=keep, rerank=rerank
        ).ids[0]
        return ids

    return answer


def tuned_osq(
    made: FilteredPhotos,
    asked: Sequence[FilteredQuery],
    wanted: float,
    bits: float,
    parts: Sequence[int],
    seed: int,
) -> tuple[OSQIndex, OSQSettings]:
    """The index and settings that are the fastest of those that reach a recall.

    Raises:
        AssertionError: none does.
    """
    best: tuple[float, OSQIndex, OSQSettings] | None = None
    for count in parts:
        index = made.osq(bits, count, seed)
        for keep, rerank in product((0.05, 0.1, 0.2), (2.0, 3.0, 4.0)):
            for beta in (1.15, 1.2, 1.25, 1.3, 1.4):
                settings = OSQSettings(count, beta, keep, rerank)
                arm = osq_arm(index, settings)
                if made.recall(arm, asked, 0) < wanted:
                    continue
                seconds = min(seconds_of(arm, asked, 0) for _ in range(3))
                if best is None or seconds < best[0]:
                    best = seconds, index, settings
                break
    assert best is not None, "no settings reach the recall"
    return best[1:]


def tuned_effort(
    made: FilteredPhotos, arm: FilteredAnswer, asked: Sequence[FilteredQuery], wanted: float
) -> float:
    """The least effort at which a recall is reached, or the largest."""
    at = bisect.bisect_left(_EFFORTS, wanted, key=lambda one: made.recall(arm, asked, one))
    return _EFFORTS[min(at, len(_EFFORTS) - 1)]


def seconds_of(arm: FilteredAnswer, asked: Sequence[FilteredQuery], effort: float) -> float:
    """Mean seconds of a query."""
    begin = time.perf_counter()
    for one in asked:
        arm(one, effort)
    return (time.perf_counter() - begin) / len(asked)


def touched_by(
    index: OSQIndex, settings: OSQSettings, asked: Sequence[FilteredQuery]
) -> dict[str, float]:
    """What searches look at, on average."""
    _, beta, keep, rerank = settings
    stats = [
        index.search(one.query, K, where=one.where, beta=beta, keep=keep, rerank=rerank).stats
        for one in asked
    ]
    return {name: float(np.mean([one[name] for one in stats])) for name in stats[0]}
