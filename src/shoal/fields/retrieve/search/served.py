"""A collection as it is served: ids and words of each tenant beside its points."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.fields.retrieve.collections import Collection, Point, PointFilter, ScoredPoint
from shoal.fields.retrieve.collections.collection import EFFORT
from shoal.fields.retrieve.index.vectors import checked_vectors
from shoal.fields.retrieve.search.protocols import (
    PointId,
    SearchError,
    SearchMethod,
    SearchQuery,
    TextEmbedder,
)
from shoal.fields.retrieve.search.words import WordIndex

_ID = "$id"
"""Attribute under which a point keeps the id that its client gave; others cannot begin so."""


SortKey: TypeAlias = tuple[bool, PointId]


@dataclass(frozen=True)
class NewPoint:
    """A point as a client sends it.

    Args:
        id: whole number, or UUID.
        vector: [dim]; None for that of ``text``.
        payload: name -> JSON.
        text: to embed; None for the collection's text attribute.
    """

    id: PointId
    vector: Sequence[float] | None = None
    payload: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None


@dataclass(frozen=True)
class ServedPoint:
    """A point as a client gets it.

    Args:
        id: as the client gave it.
        payload: without Shoal's own attribute.
        vector: float32 [dim], where it was wanted.
        score: of a query.
    """

    id: PointId
    payload: Mapping[str, Any]
    vector: np.ndarray | None = None
    score: float | None = None


class _Tenant:
    """Ids of a tenant's points, and their words."""

    def __init__(self) -> None:
        self.ids: dict[PointId, int] = {}
        self.words = WordIndex()
        self._numbers: np.ndarray | None = None
        self._keys: list[SortKey] | None = None

    def changed(self) -> None:
        self._numbers = self._keys = None

    def numbers(self) -> np.ndarray:
        """Those of the collection, int64, sorted."""
        if self._numbers is None:
            self._numbers = np.sort(np.fromiter(self.ids.values(), np.int64, len(self.ids)))
        return self._numbers

    def keys(self) -> list[SortKey]:
        """Ids in their order: whole numbers, then UUIDs."""
        if self._keys is None:
            self._keys = sorted(map(_key, self.ids))
        return self._keys


class ServedCollection:
    """Points of tenants, each of which has its own ids and its own statistics of words.

    Threads may read while others write.

    Args:
        directory: of the :class:`~shoal.fields.retrieve.collections.Collection`.
        text: attribute that BM25 reads, and that is embedded where a point has no vector.
        embedder: makes vectors of texts; None refuses texts without vectors.

    Raises:
        StoreError: the collection is damaged, or another process has it open.
    """

    def __init__(self, directory: Path, text: str, embedder: TextEmbedder | None = None) -> None:
        self.points = Collection(directory)
        self.text = text
        self._embedder = embedder
        # Writers take the first around the second; readers the second alone, and never long.
        self._writing, self._lock = threading.RLock(), threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._next = 0
        self._closed = False
        for number, payload, tenants in self.points.scan():
            self._enter(number, payload, tenants)
            self._next = max(self._next, number + 1)

    def close(self) -> None:
        """Let the files go; later changes are refused."""
        with self._writing:
            if not self._closed:
                self._closed = True
                self.points.close()

    def _enter(self, number: int, payload: Mapping[str, Any], tenants: Iterable[str]) -> None:
        name = _id_of(payload, number)
        for tenant in tenants:
            own = self._tenants.setdefault(tenant, _Tenant())
            own.ids[name] = number
            own.changed()
            if isinstance(text := payload.get(self.text), str):
                own.words.add(number, text)

    def _leave(self, number: int, payload: Mapping[str, Any], tenant: str) -> None:
        own = self._tenants[tenant]
        del own.ids[_id_of(payload, number)]
        own.changed()
        if isinstance(text := payload.get(self.text), str):
            own.words.remove(number, text)
        if not own.ids:  # as one that never was
            del self._tenants[tenant]

    def _open(self) -> None:
        if self._closed:
            raise SearchError("collection: it was deleted", status=404)

    # Changes

    def upsert(self, points: Sequence[NewPoint], tenant: str) -> None:
        """Add points, or replace those with their ids; of several with one id the last counts.

        Raises:
            SearchError: a point cannot be used, or has neither vector nor text; none is taken.
            VectorIndexError: a vector or payload cannot be used; none is taken.
            StoreError: the disk is full; none is taken.
        """
        unique = list({one.id: one for one in points}.values())
        for one in unique:
            if any(name.startswith("$") for name in one.payload):
                raise SearchError(f"point {one.id}: payload: names that begin with $ are reserved")
        texts = [(at, self._text_of(one)) for at, one in enumerate(unique) if one.vector is None]
        made = self._embedded([text for _, text in texts]) if texts else ()
        vectors = {at: row for (at, _), row in zip(texts, made, strict=True)}
        for at, one in enumerate(unique):
            try:
                vectors[at] = self._checked(vectors.get(at, one.vector))
            except ValueError as cause:
                raise SearchError(f"point {one.id}: {cause}") from cause
        with self._writing:
            self._open()
            ids = self._tenants[tenant].ids if tenant in self._tenants else {}
            numbers, fresh = [], self._next
            for one in unique:
                number = ids.get(one.id)
                if number is None:
                    number, fresh = fresh, fresh + 1
                numbers.append(number)
            old = self.points.get(numbers, tenant=tenant)
            new = [
                Point(number, vectors[at], {**one.payload, _ID: {"id": one.id}}, (tenant,))
                for at, (number, one) in enumerate(zip(numbers, unique, strict=True))
            ]
            self.points.upsert(new)
            self._next = fresh
            with self._lock:
                for number, payload in old.items():
                    self._leave(number, payload, tenant)
                for point in new:
                    self._enter(point.id, point.payload, (tenant,))

    def _checked(self, row: Any) -> np.ndarray:
        with np.errstate(over="ignore"):  # what is too large is refused as not finite
            vector: np.ndarray = checked_vectors([row], self.points.dim, self.points.metric)[0]
            return vector

    def _text_of(self, point: NewPoint) -> str:
        text = point.text if point.text is not None else point.payload.get(self.text)
        if not isinstance(text, str):
            raise SearchError(
                f"point {point.id}: expected a vector, or text in the attribute {self.text!r}"
            )
        return text

    def _embedded(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        if self._embedder is None:
            raise SearchError(
                "text: this server has no embedder; send vectors, or start it with --embedder"
            )
        vectors = self._embedder.embed(texts, query=query)
        if vectors.shape[1] != self.points.dim:
            raise SearchError(
                f"text: the embedder makes vectors of {vectors.shape[1]} numbers; expected a "
                f"collection of that size, not of {self.points.dim}"
            )
        return vectors

    def delete(self, ids: Iterable[PointId], tenant: str) -> int:
        """Remove points; how many were there.

        Raises:
            StoreError: the disk is full; all are still there.
        """
        with self._writing:
            self._open()
            own = self._tenants.get(tenant, _NOBODY).ids
            numbers = [own[one] for one in dict.fromkeys(ids) if one in own]
            old = self.points.get(numbers, tenant=tenant)
            self.points.delete(numbers)
            with self._lock:
                for number, payload in old.items():
                    self._leave(number, payload, tenant)
            return len(old)

    def delete_where(self, where: PointFilter, tenant: str) -> int:
        """Remove the points that a filter means; how many there were."""
        with self._writing:
            return self.delete([one.id for one in self._chosen(where, tenant)], tenant)

    def snapshot(self) -> None:
        """Write everything anew; see :meth:`Collection.snapshot`."""
        with self._writing:
            self._open()
            self.points.snapshot()

    def snapshots(self) -> list[tuple[str, float, int]]:
        """(name, time, bytes) of the last snapshot, if there is one."""
        with self._writing:
            facts = [path.stat() for path in self.points.snapshot_files]
            if not facts:
                return []
            name = self.points.snapshot_files[0].stem
            return [(name, max(one.st_mtime for one in facts), sum(one.st_size for one in facts))]

    # Reading; a tenant that has nothing is like one that nobody knows

    def count(self, tenant: str, where: PointFilter | None = None) -> int:
        """Points of a tenant that a filter means."""
        if where is not None:
            return len(self._chosen(where, tenant))
        with self._lock:
            return len(self._tenants.get(tenant, _NOBODY).ids)

    def get(
        self, ids: Iterable[PointId], tenant: str, *, vectors: bool = False
    ) -> list[ServedPoint]:
        """Points that are there, in the order of the ids."""
        with self._lock:
            own = self._tenants.get(tenant, _NOBODY).ids
            numbers = [own[one] for one in dict.fromkeys(ids) if one in own]
        return self._shown(numbers, tenant, vectors)

    def scroll(
        self,
        tenant: str,
        limit: int,
        *,
        where: PointFilter | None = None,
        offset: PointId | None = None,
        vectors: bool = False,
    ) -> tuple[list[ServedPoint], PointId | None]:
        """Points by their ids from ``offset`` on, and the id with which the next page begins."""
        with self._lock:
            own = self._tenants.get(tenant, _NOBODY)
            keys = own.keys()
            if where is not None:
                chosen = set(self.points.select(where, own.numbers(), tenant=tenant).tolist())
                keys = [key for key in keys if own.ids[key[1]] in chosen]
            begin = 0 if offset is None else bisect.bisect_left(keys, _key(offset))
            page = [key[1] for key in keys[begin : begin + limit + 1]]
            numbers = [own.ids[one] for one in page[:limit]]
        shown = self._shown(numbers, tenant, vectors)
        return shown, page[limit] if len(page) > limit else None

    def search(
        self, method: SearchMethod, query: SearchQuery, k: int, *, vectors: bool = False
    ) -> list[ServedPoint]:
        """What a method ranks best.

        Raises:
            SearchError: the query lacks what the method compares.
            VectorIndexError: a vector that cannot be used.
        """
        return self.results(method.rank(self, query, k), query.tenant, vectors=vectors)

    def results(
        self, hits: Sequence[ScoredPoint], tenant: str, *, vectors: bool = False
    ) -> list[ServedPoint]:
        """What clients see of hits."""
        rows = self.points.vectors([one.id for one in hits], tenant=tenant) if vectors else {}
        return [
            ServedPoint(
                _id_of(one.payload, one.id), _plain(one.payload), rows.get(one.id), one.score
            )
            for one in hits
        ]

    # Searchable

    def nearest(self, query: SearchQuery, k: int) -> list[ScoredPoint]:
        row = query.vector
        if row is None:
            if query.text is None:
                raise SearchError("query: expected a vector, or a text")
            row = self._embedded([query.text], query=True)[0]
        vector = self._checked(row)
        number = self.count(query.tenant)
        if not number:
            return []
        # So many that nothing is left out.
        effort = max(EFFORT, 1 + number / k) if query.exact else EFFORT
        return self.points.search(
            vector, k, tenant=query.tenant, where=query.where, effort=float(effort)
        )

    def matching(self, query: SearchQuery, k: int) -> list[ScoredPoint]:
        if query.text is None:
            raise SearchError("query: expected a text, in which words are looked for")
        with self._lock:
            own = self._tenants.get(query.tenant, _NOBODY)
            among = None
            if query.where is not None:
                among = self.points.select(query.where, own.numbers(), tenant=query.tenant)
            hits = own.words.search(query.text, k, among)
        payloads = self.points.get([one for one, _ in hits], tenant=query.tenant)
        return [
            ScoredPoint(id=one, score=score, payload=payloads[one])
            for one, score in hits
            if one in payloads  # it may just have gone
        ]

    def _chosen(self, where: PointFilter, tenant: str) -> list[ServedPoint]:
        with self._lock:
            numbers = self._tenants.get(tenant, _NOBODY).numbers()
        return self._shown(self.points.select(where, numbers, tenant=tenant).tolist(), tenant)

    def _shown(
        self, numbers: Sequence[int], tenant: str, vectors: bool = False
    ) -> list[ServedPoint]:
        payloads = self.points.get(numbers, tenant=tenant)
        rows = self.points.vectors(numbers, tenant=tenant) if vectors else {}
        return [
            ServedPoint(_id_of(payloads[one], one), _plain(payloads[one]), rows.get(one))
            for one in numbers
            if one in payloads
        ]


_NOBODY = _Tenant()


def _key(name: PointId) -> SortKey:
    return isinstance(name, str), name


def _id_of(payload: Mapping[str, Any], number: int) -> PointId:
    """What the client calls a point; its number, if it did not come through a server."""
    own = payload.get(_ID)
    name: PointId = own["id"] if isinstance(own, Mapping) else number
    return name


def _plain(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if name != _ID}
