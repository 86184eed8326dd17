"""A collection of points that are added, changed, removed and searched, and outlive a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, ShoalError, StoreError
from shoal.core.files import write_json
from shoal.fields.retrieve.collections.filters import AttributeIndex, PointFilter
from shoal.fields.retrieve.collections.points import (
    PUBLIC,
    Point,
    ScoredPoint,
    checked_payload,
    score_of,
)
from shoal.fields.retrieve.collections.wal import WriteAheadLog, read_log
from shoal.fields.retrieve.index.curator.index import CuratorIndex
from shoal.fields.retrieve.index.protocols import Metric, VectorIndexError
from shoal.fields.retrieve.index.vectors import checked_ids, checked_vectors

log = logging.getLogger("shoal.retrieve")

_MANIFEST, _LOCK = "collection.json", "lock"
# Points from which a tree is learned, the growth after which it is learned again, and its sample.
_TREE, _GROWTH, _SAMPLE = 5_000, 4, 100_000
TREE_POINTS = _TREE
"""Points up to which a search compares every vector."""
EFFORT = 256
"""Vectors that a search without a filter compares for each of its k."""
# Bytes of a log after which a snapshot is written.
_LOG_BYTES = 1 << 28


class CollectionManifest(Value):
    """What lies in the directory of a collection.

    Args:
        dim: numbers of a vector.
        metric: what is near.
        tenants: about so many are expected.
        generation: of the files; those of others are left over.
    """

    dim: PositiveInt
    metric: Metric = "cosine"
    tenants: PositiveInt = 256
    generation: NonNegativeInt = 0


class Collection:
    """Points in a directory: every change is on the disk when its call returns.

    Threads may search while one writes; a point that is being replaced is not found for a moment.
    One process at a time opens a directory.

    Args:
        directory: of the collection, which exists; see :meth:`create`.

    Raises:
        StoreError: there is none, it is damaged, or another process has it open.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        try:
            text = (self.directory / _MANIFEST).read_text("utf-8")
        except OSError as cause:
            raise StoreError(f"{self.directory}: no collection: {cause}") from cause
        try:
            self._manifest = parse(CollectionManifest, json.loads(text), where=_MANIFEST)
        except (ValueError, ConfigError) as cause:
            raise StoreError(f"{self.directory / _MANIFEST}: damaged: {cause}") from cause
        self._held = _hold(self.directory / _LOCK)
        # Writers take the first around the second; searches the second alone, and never long.
        self._writing, self._lock = threading.RLock(), threading.RLock()
        self._ids: np.ndarray | None = None
        self._snapshot_at = _LOG_BYTES
        self._attributes = AttributeIndex()
        self._payloads: dict[int, dict[str, Any]] = {}
        self._tenants: dict[int, tuple[str, ...]] = {}
        # Until there are enough points to learn from, the tree is its root.
        self._index = CuratorIndex(self.dim, metric=self.metric, tenants=self._manifest.tenants)
        self._index.train(np.ones((1, self.dim), np.float32))
        self._learned = 0
        try:
            self._log = self._load()
        except BaseException:
            os.close(self._held)
            raise

    @classmethod
    def create(
        cls, directory: Path | str, dim: int, *, metric: Metric = "cosine", tenants: int = 256
    ) -> Collection:
        """Make an empty collection.

        Args:
            directory: that does not exist, or is empty.
            dim: numbers of a vector.
            metric: ``cosine``, ``ip`` or ``l2``.
            tenants: about so many are expected.

        Raises:
            StoreError: something is there.
        """
        place = Path(directory)
        raw = {"dim": dim, "metric": metric, "tenants": tenants}
        manifest = parse(CollectionManifest, raw, where="collection")
        try:
            place.mkdir(parents=True, exist_ok=True)
            if any(place.iterdir()):
                raise StoreError(f"{place}: is not empty; choose another directory")
        except OSError as cause:
            raise StoreError(f"{place}: cannot be made: {cause}") from cause
        write_json(place / _MANIFEST, manifest.model_dump(mode="json"), error=StoreError)
        return cls(place)

    def close(self) -> None:
        """Let the files go."""
        self._log.close()
        os.close(self._held)

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._payloads)

    # Changes

    def upsert(self, points: Sequence[Point]) -> None:
        """Add points, or put them in the place of those with their ids.

        Raises:
            VectorIndexError: a point cannot be used; none of them is taken.
            StoreError: the disk is full; none of them is taken.
        """
        if not points:
            return
        ids = checked_ids([one.id for one in points])
        vectors = checked_vectors([np.asarray(one.vector) for one in points], self.dim, self.metric)
        payloads = [checked_payload(one.payload, one.id) for one in points]
        for one in points:
            if not one.tenants or not all(isinstance(name, str) for name in one.tenants):
                raise VectorIndexError(f"point {one.id}: tenants: expected names, at least one")
        head = {
            "op": "upsert",
            "ids": ids.tolist(),
            "payloads": payloads,
            "tenants": [list(one.tenants) for one in points],
        }
        self._change(json.dumps(head).encode() + b"\n" + vectors.tobytes())

    def delete(self, ids: Sequence[int]) -> int:
        """Remove points; how many were there.

        Raises:
            VectorIndexError: an id is no whole number.
            StoreError: the disk is full; all are still there.
        """
        with self._writing:
            there = [int(one) for one in checked_ids(ids, repeated=True) if one in self._payloads]
            if there:
                head = {"op": "delete", "ids": list(dict.fromkeys(there))}
                self._change(json.dumps(head).encode() + b"\n")
            return len(set(there))

    def _change(self, record: bytes) -> None:
        with self._writing:
            self._log.append(record)
            with self._lock:
                self._apply(record)
            self._learn()
            if self._log.num_bytes > self._snapshot_at:
                try:
                    self.snapshot()
                except ShoalError as cause:  # the change itself is on the disk
                    self._snapshot_at = 2 * self._log.num_bytes
                    log.warning("%s: no snapshot: %s", self.directory, cause)

    def _learn(self) -> None:
        """Learn a tree when there are many more points; searches go on in the old one."""
        if len(self) >= max(_TREE, _GROWTH * self._learned):
            self._index, self._learned = self._index.relearned(_SAMPLE), len(self)

    def _apply(self, record: bytes) -> None:
        text, _, blob = record.partition(b"\n")
        head = json.loads(text)
        ids, self._ids = np.array(head["ids"], np.int64), None
        self._forget([int(one) for one in ids if int(one) in self._payloads])
        if head["op"] == "delete":
            return
        vectors = np.frombuffer(blob, np.float32).reshape(len(ids), self.dim)
        self._take(ids, vectors, head["payloads"], [tuple(names) for names in head["tenants"]])

    def _forget(self, ids: list[int]) -> None:
        self._index.remove(np.array(ids, np.int64))
        for one in ids:
            self._attributes.remove(one, self._payloads.pop(one))
            del self._tenants[one]

    def _take(
        self,
        ids: np.ndarray,
        vectors: np.ndarray,
        payloads: Sequence[dict[str, Any]],
        tenants: Sequence[tuple[str, ...]],
    ) -> None:
        self._index.add(ids, vectors)
        owned: dict[str, list[int]] = {}
        for one, payload, names in zip(ids.tolist(), payloads, tenants, strict=True):
            self._payloads[one], self._tenants[one] = payload, names
            self._attributes.add(one, payload)
            for name in names:
                owned.setdefault(name, []).append(one)
        for name, some in owned.items():
            self._index.grant(np.array(some, np.int64), name)

    # Searches

    @property
    def dim(self) -> int:
        """Numbers of a vector."""
        return self._manifest.dim

    @property
    def metric(self) -> Metric:
        """What is near."""
        return self._manifest.metric

    def search(
        self,
        vector: Sequence[float] | np.ndarray,
        k: int = 10,
        *,
        tenant: str = PUBLIC,
        where: PointFilter | Mapping[str, Any] | None = None,
        effort: float = float(EFFORT),
    ) -> list[ScoredPoint]:
        """The nearest points that a tenant may see.

        Args:
            vector: of the query.
            k: how many.
            tenant: whose points are searched.
            where: a filter, as :class:`PointFilter` or its JSON. All that fit are compared.
            effort: without a filter, so many times ``k`` vectors are compared.

        Raises:
            VectorIndexError: another length, not finite, or zero under cosine; k below 1.
            ConfigError: the filter cannot be read.
        """
        if where is not None and not isinstance(where, PointFilter):
            where = parse(PointFilter, dict(where), where="filter")
        if not 1 <= k <= 10_000:
            raise VectorIndexError(f"k = {k}: expected 1 to 10000")
        with self._lock:
            index = self._index
            among = None if where is None else self._attributes.select(where, self._everything())
        if tenant not in index.tenants():
            return []
        hits = index.search(vector, k, tenant=tenant, gamma2=effort, among=among)
        with self._lock:  # an id may have become another tenant's point since it was found
            return [
                ScoredPoint(id=one, score=score_of(apart, self.metric), payload=self._payloads[one])
                for one, apart in zip(hits.ids[0].tolist(), hits.distances[0].tolist(), strict=True)
                if tenant in self._tenants.get(one, ())
            ]

    def _everything(self) -> np.ndarray:
        """All ids, sorted."""
        if self._ids is None:
            self._ids = np.sort(np.fromiter(self._payloads, np.int64, len(self._payloads)))
        return self._ids

    def get(self, ids: Sequence[int], *, tenant: str = PUBLIC) -> dict[int, Mapping[str, Any]]:
        """Payloads of the points that are there and that the tenant may see."""
        with self._lock:
            return {one: self._payloads[one] for one in ids if tenant in self._tenants.get(one, ())}

    def select(self, where: PointFilter, among: np.ndarray, *, tenant: str = PUBLIC) -> np.ndarray:
        """Ids that a filter means among some, int64, sorted.

        Args:
            where: the filter.
            among: ids, int64, sorted, none twice.
            tenant: who sees them.
        """
        with self._lock:
            ids = self._attributes.select(where, among).tolist()
            fits = [one for one in ids if tenant in self._tenants.get(one, ())]
            return np.array(fits, np.int64)

    def vectors(self, ids: Sequence[int], *, tenant: str = PUBLIC) -> dict[int, np.ndarray]:
        """Vectors, float32 [dim], of the points that are there and that the tenant may see.

        They are as they were added within rounding; those of ``cosine`` have length 1.
        """
        with self._lock:
            wanted = [one for one in dict.fromkeys(ids) if tenant in self._tenants.get(one, ())]
            if not wanted:
                return {}
            return dict(zip(wanted, self._index.vectors(wanted), strict=True))

    def scan(self) -> list[tuple[int, Mapping[str, Any], tuple[str, ...]]]:
        """Every point's id, payload and tenants, for who may see all of them."""
        with self._lock:
            return [(one, payload, self._tenants[one]) for one, payload in self._payloads.items()]

    # Files

    @property
    def snapshot_files(self) -> tuple[Path, ...]:
        """Files of the last snapshot; none before the first."""
        number = self._manifest.generation
        return (self._index_file(number), self._points_file(number)) if number else ()

    def snapshot(self) -> None:
        """Write everything as it is, and begin a new log.

        Raises:
            ShoalError: the disk is full; the collection is as before.
        """
        with self._writing:
            manifest = self._manifest.model_copy(
                update={"generation": self._manifest.generation + 1}
            )
            number = manifest.generation
            self._index.save(self._index_file(number))
            points = {
                str(one): {"payload": payload, "tenants": self._tenants[one]}
                for one, payload in self._payloads.items()
            }
            write_json(self._points_file(number), points, error=StoreError)
            fresh = WriteAheadLog(self._log_file(number))
            try:
                raw = manifest.model_dump(mode="json")
                write_json(self.directory / _MANIFEST, raw, error=StoreError)
            except StoreError:
                fresh.close()
                raise
            self._log.close()
            self._manifest, self._log, self._snapshot_at = manifest, fresh, _LOG_BYTES
            self._clean()

    def _index_file(self, number: int) -> Path:
        return self.directory / f"index-{number}.safetensors"

    def _points_file(self, number: int) -> Path:
        return self.directory / f"points-{number}.json"

    def _log_file(self, number: int) -> Path:
        return self.directory / f"log-{number}"

    def _clean(self) -> None:
        """Remove files of other generations."""
        number = self._manifest.generation
        keep = {self._index_file(number), self._points_file(number), self._log_file(number)}
        for pattern in ("index-*.safetensors", "points-*.json", "log-*"):
            for file in set(self.directory.glob(pattern)) - keep:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _load(self) -> WriteAheadLog:
        """Read snapshot and log; the log, open for more."""
        number = self._manifest.generation
        if number:
            self._read_snapshot(number)
        file, end = self._log_file(number), 0
        if file.exists():
            records, end = read_log(file)
            for record in records:
                self._apply(record)
            self._learn()
        self._clean()
        return WriteAheadLog(file, end)

    def _read_snapshot(self, number: int) -> None:
        try:
            index = CuratorIndex.load(self._index_file(number))
            points = json.loads(self._points_file(number).read_text("utf-8"))
            for text, one in points.items():
                self._payloads[int(text)] = one["payload"]
                self._tenants[int(text)] = tuple(one["tenants"])
                self._attributes.add(int(text), one["payload"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as cause:
            raise StoreError(f"{self.directory}: its snapshot is damaged: {cause}") from cause
        if len(index) != len(points) or index.dim != self.dim:
            raise StoreError(f"{self.directory}: its snapshot is damaged: its files differ")
        self._index, self._learned = index, len(index)


def _hold(path: Path) -> int:
    """A lock that ends with this process; its descriptor.

    Raises:
        StoreError: another process has it.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as cause:
        raise StoreError(f"{path}: cannot be written: {cause}") from cause
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as cause:
        os.close(file)
        raise StoreError(f"{path.parent}: another process has this collection open") from cause
    return file
