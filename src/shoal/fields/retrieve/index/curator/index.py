"""Curator: one index for many tenants, each of which sees a tree of its own.

Source: Jin et al., Curator: Efficient Indexing for Multi-Tenant Vector Databases, 2024.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence, Set
from ctypes import byref, c_char, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.native import build
from shoal.fields.retrieve.index.curator.tenants import TenantExpression
from shoal.fields.retrieve.index.protocols import Hits, Metric, VectorIndexError
from shoal.fields.retrieve.index.vectors import checked_ids, checked_vectors

_FLAGS = ("-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-mprefer-vector-width=512")
# Bits of a node's filter for each tenant that may be beneath it.
_BITS = 8
_DEPTH = 8
# Neighbours of a query.
_MOST = 65_536
# Above so many coordinates a query takes longer to be turned than it saves.
_TURNED = 512
# Vectors from which the basis is taken.
_FEW = 20_000
_PARTS = ("vectors", "ids", "tree", "filters", "lists")


@functools.cache
def native() -> ctypes.CDLL:
    """The library.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    library = build(source, name="curator", flags=_FLAGS)
    p, n = c_void_p, c_int64
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "new": (p, [n, n, n, n, c_int]),
        "free": (None, [p]),
        "train": (None, [p, p, n, c_uint64]),
        "find": (None, [p, p, n, p]),
        "add": (None, [p, p, p, n, n]),
        "remove": (None, [p, p, n]),
        "grant": (None, [p, p, n, c_uint32]),
        "revoke": (n, [p, p, n, c_uint32]),
        "search": (None, [p, p, n, n, c_uint32, c_double, c_double, n, p, p, p]),
        "among": (None, [p, p, n, n, p, n, p, p]),
        "vectors": (None, [p, p, n, p]),
        "rows_of": (n, [p, c_uint32, p]),
        "memory": (None, [p, p]),
        "counts": (None, [p, p]),
        "broken": (n, [p]),
        "tree": (None, [p, p, p]),
        "set_tree": (None, [p, p, p, n]),
        "rows": (n, [p, p, p, p, p]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, f"curator_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class CuratorIndex:
    """Vectors of many tenants in one tree, with a cut of its own for each tenant.

    Threads may search while one adds, grants or removes; a search sees every change that was
    made before it began.

    Args:
        dim: numbers of a vector.
        metric: ``l2``, ``ip`` (inner product) or ``cosine``.
        branching: children of the root; halved from level to level, down to 4.
        shortlist: most ids in a list above the leaves.
        gamma1: a search looks at ``gamma1 * gamma2 * k`` ids of lists,
        gamma2: and compares the vectors of ``gamma2 * k`` of them.
        tenants: about so many are expected; more make searches slower, and never wrong.
        seed: of the tree.

    Raises:
        VectorIndexError: an option is out of range.
        BuildError: there is no compiler.
    """

    def __init__(
        self,
        dim: int,
        *,
        metric: Metric = "l2",
        branching: int = 32,
        shortlist: int = 128,
        gamma1: float = 16.0,
        gamma2: float = 256.0,
        tenants: int = 256,
        seed: int = 0,
    ) -> None:
        if dim < 1 or branching < 2 or shortlist < 1 or gamma1 < 1 or gamma2 <= 0 or tenants < 1:
            raise VectorIndexError(
                "curator: dim, shortlist, gamma1 and tenants are at least 1, branching at least 2, "
                "gamma2 above 0"
            )
        self.dim, self.metric = dim, metric
        self.gamma1, self.gamma2, self.seed = gamma1, gamma2, seed
        words = max(4, -(-tenants * _BITS // 64))
        self._native = native()
        self._index = self._native.curator_new(
            dim, branching, shortlist, words, int(metric != "l2")
        )
        self._options: dict[str, Any] = {
            "branching": branching, "shortlist": shortlist, "gamma1": gamma1, "gamma2": gamma2,
            "tenants": tenants, "seed": seed,
        }  # fmt: skip
        self._trained = False
        # Columns are the directions in which vectors differ, the most first: a distance that adds
        # them up in this order is seen early to be too large. None: as they come.
        self._basis: np.ndarray | None = None
        self._numbers: dict[Hashable, int] = {}
        self._warned: set[Hashable] = set()
        self._writing = threading.RLock()

    def __del__(self) -> None:
        if index := getattr(self, "_index", None):
            self._native.curator_free(index)

    def __len__(self) -> int:
        return int(self.counts()["rows"])

    # Writing

    def train(self, sample: np.ndarray) -> None:
        """Make the tree; every vector lies in one of its leaves.

        Args:
            sample: float32 [N, dim]; some thousands for each leaf of the first level are enough.

        Raises:
            VectorIndexError: it is trained already, or the sample is empty or not finite.
        """
        sample = checked_vectors(sample, self.dim, self.metric)
        if self._trained:
            raise VectorIndexError("curator: trained already")
        if not len(sample):
            raise VectorIndexError("curator: an empty sample")
        if self.metric == "l2" and self.dim <= _TURNED:
            few = sample[:_FEW].astype(np.float64)
            few -= few.mean(axis=0)
            self._basis = np.ascontiguousarray(np.linalg.eigh(few.T @ few)[1][:, ::-1], np.float32)
        sample = self._turned(sample)
        self._native.curator_train(self._index, sample.ctypes.data, len(sample), self.seed)
        self._trained = True

    def add(self, ids: Any, vectors: Any, *, tenant: Hashable | None = None) -> None:
        """Add vectors, which their tenant may see, and others that are granted them.

        Args:
            ids: int64 [N], none of which is there.
            vectors: float32 [N, dim].
            tenant: their first owner.

        Raises:
            VectorIndexError: before :meth:`train`; an id is there, or comes twice; vectors of
                another length, or with numbers that are not finite.
        """
        if not self._trained:
            raise VectorIndexError("curator: add before train; call train(sample) first")
        names, rows = checked_ids(ids), checked_vectors(vectors, self.dim, self.metric)
        if len(names) != len(rows):
            raise VectorIndexError(f"curator: {len(names)} ids for {len(rows)} vectors")
        self._add(names, self._turned(rows), tenant)

    def grant(self, ids: Any, tenant: Hashable) -> None:
        """Let a tenant see vectors.

        Raises:
            VectorIndexError: an id is not there.
        """
        with self._writing:
            rows = np.sort(self._known(ids))  # lists are read in the order of memory
            number = self._number(tenant)
            self._native.curator_grant(self._index, rows.ctypes.data, len(rows), number)

    def revoke(self, ids: Any, tenant: Hashable) -> int:
        """Let a tenant see vectors no more.

        Returns:
            How many of them it saw.

        Raises:
            VectorIndexError: an id is not there.
        """
        with self._writing:
            rows = self._known(ids)
            if tenant not in self._numbers:
                return 0
            number = self._numbers[tenant]
            return int(
                self._native.curator_revoke(self._index, rows.ctypes.data, len(rows), number)
            )

    def remove(self, ids: Any) -> int:
        """Remove vectors for all tenants; ids that are not there are passed over.

        Returns:
            How many were there.
        """
        names = checked_ids(ids)
        with self._writing:
            names = np.ascontiguousarray(names[self._rows(names) >= 0])
            self._native.curator_remove(self._index, names.ctypes.data, len(names))
        return len(names)

    # Reading

    def search(
        self,
        queries: Any,
        k: int,
        *,
        tenant: Hashable | TenantExpression,
        gamma1: float | None = None,
        gamma2: float | None = None,
        among: Any = None,
        threads: int = 1,
    ) -> Hits:
        """The nearest vectors that a tenant may see.

        Args:
            queries: float32 [Q, dim], or one of [dim].
            k: of each query.
            tenant: whose; or an expression of tenants, see :func:`parse_tenants`, which is
                answered exactly from the vectors that it selects.
            gamma1: in place of the index's.
            gamma2: in place of the index's.
            among: ids [N] from which the answer comes, all of which the tenant sees are compared;
                None for all that the tenant sees.
            threads: that share the queries.

        Returns:
            Ids [Q, k], -1 where there are no more, and their distances (squared with ``l2``).

        Raises:
            VectorIndexError: queries of another length or not finite; an argument is out of range.
        """
        asked = checked_vectors(np.atleast_2d(np.asarray(queries)), self.dim, self.metric)
        asked = self._turned(asked)
        near, more = (
            self.gamma1 if gamma1 is None else gamma1,
            self.gamma2 if gamma2 is None else gamma2,
        )
        if not 1 <= k <= _MOST or threads < 1 or not near >= 1 or not more > 0:
            raise VectorIndexError(
                f"search: k = {k}, threads = {threads}, gamma1 = {near}, gamma2 = {more}: k from 1 "
                f"to {_MOST}, threads and gamma1 at least 1, gamma2 above 0"
            )
        names, apart = np.empty((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
        stats = np.zeros((len(asked), 3), np.int64)
        if isinstance(tenant, TenantExpression) or (among is not None and tenant in self._numbers):
            with self._writing:  # rows stay what they are until they are compared
                rows = self._chosen(tenant, among)
                self._native.curator_among(
                    self._index, asked.ctypes.data, len(asked), k, rows.ctypes.data, len(rows),
                    names.ctypes.data, apart.ctypes.data,
                )  # fmt: skip
            stats[:, 0] = len(rows)
        elif (number := self._numbers.get(tenant)) is None:
            names[:], apart[:] = -1, np.inf
            if tenant not in self._warned:
                self._warned.add(tenant)
                warnings.warn(f"tenant {tenant!r} has no vectors", stacklevel=2)
        elif len(asked):
            self._native.curator_search(
                self._index, asked.ctypes.data, len(asked), k, number, near, more, threads,
                _at(names), _at(apart), _at(stats),
            )  # fmt: skip
        return Hits(
            ids=names,
            distances=apart,
            stats={"compared": stats[:, 0], "listed": stats[:, 1], "nodes": stats[:, 2]},
        )

    def tenants(self) -> Set[Hashable]:
        """All that were ever given a vector."""
        return self._numbers.keys()

    def ids_of(self, tenant: Hashable) -> np.ndarray:
        """Ids of a tenant's vectors, int64, sorted."""
        names, _, owners, tenants = self._everything(vectors=False)
        number = self._numbers.get(tenant, -1)
        of = np.repeat(np.arange(len(names)), owners)
        return np.sort(names[of[tenants == number]])

    def vectors(self, ids: Any) -> np.ndarray:
        """Vectors, float32 [N, dim], as added, within rounding; of length 1 with ``cosine``.

        Raises:
            VectorIndexError: an id is not there.
        """
        with self._writing:
            rows = self._known(ids)
            turned = np.empty((len(rows), self.dim), np.float32)
            self._native.curator_vectors(
                self._index, rows.ctypes.data, len(rows), turned.ctypes.data
            )
        return self._turned_back(turned)

    def memory(self) -> Mapping[str, int]:
        """Bytes of each component."""
        sizes = np.zeros(len(_PARTS), np.int64)
        self._native.curator_memory(self._index, sizes.ctypes.data)
        return dict(zip(_PARTS, map(int, sizes), strict=True))

    def counts(self) -> Mapping[str, int]:
        """How many nodes, leaves, rows and lists there are, and how often filters were rebuilt."""
        found = np.zeros(5, np.int64)
        self._native.curator_counts(self._index, found.ctypes.data)
        names = ("nodes", "leaves", "rows", "lists", "rebuilt")
        return dict(zip(names, map(int, found), strict=True))

    def broken(self) -> int:
        """How often the invariants of the lists do not hold: 0."""
        return int(self._native.curator_broken(self._index))

    # Files

    def save(self, path: Path) -> Path:
        """Write tree, vectors and owners as safetensors; the same path.

        Tenants are kept as JSON, so their names are text or whole numbers.

        Raises:
            VectorIndexError: a tenant has another name.
        """
        numpy: Any = import_extra("safetensors.numpy", extra="run", purpose="a file of an index")
        names = list(self._numbers)
        if not all(isinstance(one, str | int) for one in names):
            raise VectorIndexError("curator: only tenants named by text or numbers can be saved")
        counts = self.counts()
        nodes = np.empty((counts["nodes"], 4), np.int32)
        centroids = np.empty((counts["nodes"], self.dim), np.float32)
        self._native.curator_tree(self._index, nodes.ctypes.data, centroids.ctypes.data)
        ids, vectors, owners, tenants = self._everything()
        words = {"metric": self.metric, "options": self._options, "tenants": names}
        arrays = {
            "nodes": nodes, "centroids": centroids, "ids": ids, "vectors": vectors,
            "owners": owners, "tenants": tenants,
        }  # fmt: skip
        if self._basis is not None:
            arrays["basis"] = self._basis
        text = numpy.save(arrays, {"curator": json.dumps(words)})
        write_atomic(path, text)
        return path

    @classmethod
    def load(cls, path: Path) -> CuratorIndex:
        """An index that was saved.

        Raises:
            VectorIndexError: the file is none, or is damaged.
        """
        safe: Any = import_extra("safetensors", extra="run", purpose="a file of an index")
        try:
            with safe.safe_open(path, "np") as file:
                words = json.loads(file.metadata()["curator"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            nodes, ids, owners = arrays["nodes"], arrays["ids"], arrays["owners"]
            made = cls(arrays["vectors"].shape[1], metric=words["metric"], **words["options"])
            made._put_tree(nodes, arrays["centroids"], arrays.get("basis"))
            made._add(checked_ids(ids), checked_vectors(arrays["vectors"], made.dim, "l2"), None)
            made._grant_all(ids, owners, arrays["tenants"], words["tenants"])
        except (
            OSError,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            safe.SafetensorError,
        ) as cause:
            raise VectorIndexError(f"{path}: not an index of curator: {cause}") from cause
        return made

    def relearned(self, sample: int) -> CuratorIndex:
        """The same vectors and tenants with a tree that is learned anew; this index stays as it is.

        Args:
            sample: vectors, drawn at random, from which it is learned.
        """
        with self._writing:
            ids, vectors, owners, tenants = self._everything()
            names = list(self._numbers)
        vectors = self._turned_back(vectors)
        made = CuratorIndex(self.dim, metric=self.metric, **self._options)
        drawn = np.random.default_rng(self.seed).permutation(len(vectors))[:sample]
        made.train(vectors[np.sort(drawn)])
        made.add(ids, vectors)
        made._grant_all(ids, owners, tenants, names)
        return made

    def _grant_all(
        self, ids: np.ndarray, owners: np.ndarray, tenants: np.ndarray, names: Sequence[Hashable]
    ) -> None:
        """Grant ids to their owners: so many each, behind each other, as places in ``names``."""
        if len(owners) != len(ids) or (owners < 0).any() or owners.sum() != len(tenants):
            raise VectorIndexError("owners: other numbers than there are vectors")
        if len(tenants) and not 0 <= tenants.min() <= tenants.max() < len(names):
            raise VectorIndexError("tenants: one that has no name")
        of = np.repeat(ids, owners)
        order = np.argsort(tenants, kind="stable")
        ends = np.searchsorted(tenants[order], np.arange(len(names)), side="right")
        for name, some in zip(names, np.split(of[order], ends[:-1]), strict=True):
            self.grant(some, name)

    def _put_tree(self, nodes: np.ndarray, centroids: np.ndarray, basis: np.ndarray | None) -> None:
        """Take a tree from a file, which may be wrong in any way."""
        if basis is not None:
            basis = checked_vectors(basis, self.dim, "l2")
            if not np.allclose(basis.T @ basis, np.eye(self.dim), atol=1e-3):
                raise VectorIndexError("basis: not orthonormal")
            self._basis = basis
        nodes = np.ascontiguousarray(nodes, np.int32)
        centroids = checked_vectors(centroids, self.dim, "l2")
        count = len(nodes)
        if nodes.shape != (count, 4) or not count or len(centroids) != count:
            raise VectorIndexError("nodes: another shape")
        parent, first, children, depth = nodes.T.astype(np.int64)
        inner = children > 0
        of = np.repeat(np.flatnonzero(inner), children[inner])
        below = _spans(first[inner], children[inner])
        if (
            parent[0] != -1
            or depth[0]
            or (children < 0).any()
            or not np.array_equal(np.sort(below), np.arange(1, count))
            or (parent[below] != of).any()
            or (below <= of).any()  # so that no way leads back
            or (depth[1:] != depth[parent[1:]] + 1).any()
            or depth.max() > _DEPTH
        ):
            raise VectorIndexError("nodes: not a tree")
        self._native.curator_set_tree(self._index, nodes.ctypes.data, centroids.ctypes.data, count)
        self._trained = True

    # Inside

    def _turned(self, vectors: np.ndarray) -> np.ndarray:
        """Coordinates in the basis; distances stay."""
        return vectors if self._basis is None else np.ascontiguousarray(vectors @ self._basis)

    def _turned_back(self, turned: np.ndarray) -> np.ndarray:
        return turned if self._basis is None else np.ascontiguousarray(turned @ self._basis.T)

    def _add(self, names: np.ndarray, turned: np.ndarray, tenant: Hashable | None) -> None:
        with self._writing:
            there = names[self._rows(names) >= 0]
            if len(there):
                raise VectorIndexError(f"curator: id {there[0]} is there already; remove it first")
            number = -1 if tenant is None else self._number(tenant)
            self._native.curator_add(
                self._index, names.ctypes.data, turned.ctypes.data, len(names), number
            )

    def _number(self, tenant: Hashable) -> int:
        if isinstance(tenant, TenantExpression):
            raise VectorIndexError(
                "curator: vectors are granted to one tenant, not to an expression"
            )
        return self._numbers.setdefault(tenant, len(self._numbers))

    def _rows(self, names: np.ndarray) -> np.ndarray:
        rows = np.empty(len(names), np.int32)
        self._native.curator_find(self._index, names.ctypes.data, len(names), rows.ctypes.data)
        return rows

    def _known(self, ids: Any) -> np.ndarray:
        names = checked_ids(ids, repeated=True)
        rows = self._rows(names)
        if len(rows) and rows.min() < 0:
            raise VectorIndexError(f"curator: id {names[rows < 0][0]} is not there")
        return rows

    def _rows_of(self, tenant: Hashable) -> np.ndarray:
        number = self._numbers.get(tenant)
        if number is None:
            return np.empty(0, np.int32)
        rows = np.empty(self._native.curator_rows_of(self._index, number, None), np.int32)
        self._native.curator_rows_of(self._index, number, rows.ctypes.data)
        return np.sort(rows)

    def _chosen(self, tenant: Hashable | TenantExpression, among: Any) -> np.ndarray:
        """Rows that a tenant, or an expression, sees among some ids."""
        if isinstance(tenant, TenantExpression):
            rows = tenant.select(self._rows_of, self._all)
        else:
            rows = self._rows_of(tenant)
        if among is not None:
            some = self._rows(checked_ids(among, repeated=True))
            rows = np.intersect1d(rows, some)  # -1, what is not there, is no row
        return np.ascontiguousarray(rows, np.int32)

    def _all(self) -> np.ndarray:
        names = self._everything(vectors=False)[0]
        return np.sort(self._rows(names))

    def _everything(
        self, *, vectors: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Ids, vectors (or an array without rows), number of owners of each, owners."""
        with self._writing:
            count = len(self)
            total = self._native.curator_rows(self._index, None, None, None, None)
            names = np.empty(count, np.int64)
            rows = np.empty((count if vectors else 0, self.dim), np.float32)
            owners, tenants = np.empty(count, np.int32), np.empty(total, np.int32)
            self._native.curator_rows(
                self._index, names.ctypes.data, rows.ctypes.data if vectors else None,
                owners.ctypes.data, tenants.ctypes.data,
            )  # fmt: skip
        return names, rows, owners, tenants


def _at(array: Any) -> Any:
    """Where an array that may be written lies; a third of the time of ``array.ctypes.data``."""
    return byref(c_char.from_buffer(array))


def _spans(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers from each first on, so many each, behind each other."""
    begins = np.repeat(firsts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    spans: np.ndarray = begins + np.arange(counts.sum())
    return spans
