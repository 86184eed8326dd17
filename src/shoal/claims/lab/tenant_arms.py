"""Tenants of descriptors of photographs, and the indexes that a claim lets answer for them.

A tenant sees a square of a photograph: its vectors are unlike those of others. Sizes fall with the
rank as Zipf's law has it.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.random import generator
from shoal.corpora.photos import photo_descriptors
from shoal.fields.retrieve.index import CuratorIndex
from shoal.fields.retrieve.index.ivf_flat import num_cells

Answer = Callable[[int, np.ndarray, float], np.ndarray]
"""Ids of the 10 nearest, of (tenant, query, effort)."""

K = 10
# Of the sizes of tenants: with it 200 of them share each of 300,000 vectors among six.
_FALL = 1.3
_CELLS_EACH = 64
# Coordinates that Curator looks at of every vector.
_FIRST = 64
_EFFORTS = [1.2**power for power in range(52)]


@dataclass(frozen=True)
class Asked:
    """A query of a tenant.

    Args:
        tenant: its rank, from 0.
        query: float32 [d].
        nearest: exact squared distance of its 10th neighbour.
    """

    tenant: int
    query: np.ndarray
    nearest: float


class Tenants:
    """Who sees what, and queries of patches from what they see.

    Args:
        vectors: how many there are.
        tenants: how many.
        largest: vectors of the first.
        smallest: of the last.
        seed: of the squares and the queries.
    """

    def __init__(self, vectors: int, tenants: int, largest: int, smallest: int, seed: int) -> None:
        draw = generator(seed, purpose="tenants")
        held = max(200, vectors // 100)
        found = photo_descriptors(vectors + held, seed=seed)
        self.vectors = np.ascontiguousarray(found.vectors[held:])
        photo, corner = found.photo[held:], found.corner[held:]
        self.owned: list[np.ndarray] = []
        self._of: list[np.ndarray] = []
        for rank in range(tenants):
            size = min(largest, round(smallest * (tenants / (rank + 1)) ** _FALL))
            centre = int(draw.integers(len(photo)))
            place = photo[centre], corner[centre]
            apart = _apart(photo, corner, *place)
            ids = np.argpartition(apart, size - 1)[:size]
            self.owned.append(np.sort(ids))
            mine = _apart(found.photo[:held], found.corner[:held], *place) <= apart[ids].max()
            # A square between all patches that are held out has the vectors' own.
            self._of.append(found.vectors[:held][mine] if mine.any() else self.vectors[ids[:20]])

    @property
    def sharing(self) -> float:
        """Tenants of a vector, on average."""
        return sum(map(len, self.owned)) / len(self.vectors)

    def asked(self, tenants: Sequence[int], each: int, seed: int) -> list[Asked]:
        """Queries of some tenants, with their truth."""
        draw, result = generator(seed, purpose="queries"), []
        for tenant in tenants:
            own = self.vectors[self.owned[tenant]]
            for at in draw.integers(0, len(self._of[tenant]), each):
                query = self._of[tenant][at]
                apart = ((own - query) ** 2).sum(axis=1)
                result.append(Asked(tenant, query, float(np.partition(apart, K - 1)[K - 1])))
        return result

    def recall(self, answer: Answer, asked: Sequence[Asked], effort: float) -> float:
        """The share of the true neighbours that an arm finds; its ids are its tenant's."""
        shares = []
        for one in asked:
            ids = answer(one.tenant, one.query, effort)
            ids = ids[ids >= 0]
            assert np.isin(ids, self.owned[one.tenant]).all(), "ids of another tenant"
            apart = ((self.vectors[ids] - one.query) ** 2).sum(axis=1)
            shares.append(min(K, int((apart <= one.nearest * (1 + 1e-5)).sum())) / K)
        return float(np.mean(shares))

    # Arms: bytes, and the answers

    def curator(self, seed: int) -> CuratorIndex:
        """One tree for all."""
        dim, count = self.vectors.shape[1], len(self.vectors)
        index = CuratorIndex(dim, tenants=len(self.owned), seed=seed)
        index.train(self.vectors[: min(count, 100_000)])
        index.add(np.arange(count), self.vectors)
        for tenant, ids in enumerate(self.owned):
            index.grant(ids, tenant)
        return index

    def scan(self, index: CuratorIndex) -> Answer:
        """Every vector of the tenant, by the same compiled loop."""
        rows = [index._rows(ids) for ids in self.owned]
        ids, apart = np.empty(K, np.int64), np.empty(K, np.float32)

        def answer(tenant: int, query: np.ndarray, effort: float) -> np.ndarray:
            mine, turned = rows[tenant], index._turned(query[None])
            index._native.curator_among(
                index._index, turned.ctypes.data, 1, K, mine.ctypes.data, len(mine),
                ids.ctypes.data, apart.ctypes.data,
            )  # fmt: skip
            return ids

        return answer

    def filtered(self, index: Any, parameters: Callable[[Any, float], Any]) -> Answer:
        """One index of faiss with a bitmap for each tenant."""
        faiss = _faiss()
        maps = [np.packbits(self._mask(ids), bitorder="little") for ids in self.owned]
        selectors = [faiss.IDSelectorBitmap(one) for one in maps]

        def answer(tenant: int, query: np.ndarray, effort: float) -> np.ndarray:
            chosen = parameters(selectors[tenant], effort)
            ids: np.ndarray = index.search(query[None], K, params=chosen)[1][0]
            return ids

        return answer

    def _mask(self, ids: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(self.vectors), bool)
        mask[ids] = True
        return mask

    def shared_ivf(self) -> tuple[Any, Answer]:
        """IVFFlat with a bitmap."""
        faiss, index = _faiss(), ivf(self.vectors)

        def parameters(selector: Any, effort: float) -> Any:
            return faiss.SearchParametersIVF(sel=selector, nprobe=min(index.nlist, round(effort)))

        return index, self.filtered(index, parameters)

    def shared_hnsw(self) -> tuple[Any, Answer]:
        """HNSW with a bitmap."""
        faiss = _faiss()
        index = faiss.IndexHNSWFlat(self.vectors.shape[1], 16)
        index.hnsw.efConstruction = 100
        index.add(self.vectors)

        def parameters(selector: Any, effort: float) -> Any:
            return faiss.SearchParametersHNSW(sel=selector, efSearch=round(effort))

        return index, self.filtered(index, parameters)

    def separate_ivf(self) -> tuple[int, Answer]:
        """An IVFFlat for each tenant; their bytes."""
        faiss = _faiss()
        indexes = [ivf(self.vectors[ids]) for ids in self.owned]

        def answer(tenant: int, query: np.ndarray, effort: float) -> np.ndarray:
            index = indexes[tenant]
            chosen = faiss.SearchParametersIVF(nprobe=min(index.nlist, round(effort)))
            ids = index.search(query[None], K, params=chosen)[1][0]
            return np.where(ids >= 0, self.owned[tenant][ids], -1)

        return sum(map(size_of, indexes)), answer


def _apart(photos: np.ndarray, corners: np.ndarray, photo: Any, corner: Any) -> np.ndarray:
    """How far patches are from one, on the longer axis; infinite in another photograph."""
    far: np.ndarray = np.abs(corners - corner).max(axis=1).astype(float)
    far[photos != photo] = np.inf
    return far


def ivf(vectors: np.ndarray) -> Any:
    """An IVFFlat of faiss with the usual number of cells."""
    faiss, dim = _faiss(), vectors.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dim), dim, num_cells(len(vectors)))
    index.cp.max_points_per_centroid, index.cp.min_points_per_centroid = _CELLS_EACH, 1
    index.train(vectors)
    index.add(vectors)
    return index


def size_of(index: Any) -> int:
    """Bytes of an index of faiss."""
    return len(_faiss().serialize_index(index))


def _faiss() -> Any:
    faiss: Any = import_extra("faiss", extra="fields", purpose="the peers of the claim")
    faiss.omp_set_num_threads(1)
    return faiss


def tuned(made: Tenants, arm: Answer, asked: Sequence[Asked], wanted: float) -> float:
    """The least effort at which a recall is reached, or the largest."""
    at = bisect.bisect_left(_EFFORTS, wanted, key=lambda one: made.recall(arm, asked, one))
    return _EFFORTS[min(at, len(_EFFORTS) - 1)]


def seconds_of(arm: Answer, asked: Sequence[Asked], effort: float) -> float:
    """Mean seconds of a query."""
    begin = time.perf_counter()
    for one in asked:
        arm(one.tenant, one.query, effort)
    return (time.perf_counter() - begin) / len(asked)


def curator_arm(index: CuratorIndex, gamma1: float) -> Answer:
    """Curator, whose effort is the share ``gamma2`` that is compared."""

    def answer(tenant: int, query: np.ndarray, effort: float) -> np.ndarray:
        ids: np.ndarray = index.search(query, K, tenant=tenant, gamma1=gamma1, gamma2=effort).ids[0]
        return ids

    return answer


def tuned_gammas(
    made: Tenants,
    index: CuratorIndex,
    asked: Sequence[Asked],
    wanted: float,
    gammas: Sequence[int],
) -> tuple[float, float]:
    """Of some ``gamma1``, each with the least ``gamma2`` that reaches a recall, the fastest."""
    found = {one: tuned(made, curator_arm(index, one), asked, wanted) for one in gammas}
    taken = {one: seconds_of(curator_arm(index, one), asked, more) for one, more in found.items()}
    first = min(taken, key=taken.__getitem__)
    return float(first), found[first]


def touched_by(index: CuratorIndex, asked: Sequence[Asked], gamma1: float, gamma2: float) -> float:
    """Nodes and ids that Curator looks at for a query, on average."""
    found = [
        index.search(one.query, K, tenant=one.tenant, gamma1=gamma1, gamma2=gamma2).stats
        for one in asked
    ]
    return float(np.mean([one["nodes"] + one["listed"] for one in found]))


def reading_of(
    index: CuratorIndex, asked: Sequence[Asked], gamma1: float, gamma2: float
) -> tuple[float, str]:
    """The limit of a query, and where its time goes.

    Returns:
        Seconds in which one core reads the first coordinates of all that a query compares; text.
    """
    from shoal.machine.probes.memory_bandwidth import bandwidth_samples

    stats = [
        index.search(one.query, K, tenant=one.tenant, gamma1=gamma1, gamma2=gamma2).stats
        for one in asked
    ]
    compared = float(np.mean([one["compared"] for one in stats]))
    core = (min(os.sched_getaffinity(0)),)
    rates = bandwidth_samples("read", 2**27, core, repeats=3, sample_bytes=2**29)
    read_s = compared * _FIRST * 4 / max(rates)
    # The same lists are looked for where the vectors of one of them are compared.
    tree = curator_arm(index, gamma1 * gamma2)
    whole_s, tree_s = (
        min(seconds_of(arm, asked, effort) for _ in range(5))
        for arm, effort in ((curator_arm(index, gamma1), gamma2), (tree, 1.0))
    )
    profile = (
        f"of {1e6 * whole_s:.1f} us {1e6 * tree_s:.1f} are the call and the tree, the others "
        f"{compared:.0f} vectors, whose first {_FIRST} coordinates can be read in "
        f"{1e6 * read_s:.1f}"
    )
    return read_s, profile


def changes_per_s(
    index: CuratorIndex, made: Tenants, ours: Answer, asked: Sequence[Asked]
) -> float:
    """Vectors that are added or removed in a second while a thread searches."""
    over = threading.Event()

    def search() -> None:
        while not over.is_set():
            for one in asked[:100]:
                ours(one.tenant, one.query, 64.0)

    vectors = made.vectors[:20_000]
    ids = np.arange(len(vectors)) + 10**9
    reader = threading.Thread(target=search)
    reader.start()
    begin = time.perf_counter()
    for at in range(0, len(ids), 100):
        index.add(ids[at : at + 100], vectors[at : at + 100], tenant=at % 7)
    for at in range(0, len(ids), 100):
        index.remove(ids[at : at + 100])
    seconds = time.perf_counter() - begin
    over.set()
    reader.join()
    return 2 * len(ids) / seconds
