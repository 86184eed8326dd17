"""OSQ: an index whose vectors and attributes are codes in shared bit segments.

Source: Oakley and Ferhatosmanoglu, SQUASH: Serverless and Distributed Quantization-based
Attributed Vector Similarity Search, 2025.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shoal.core.native import build
from shoal.core.random import generator
from shoal.fields.retrieve.collections.filters import PointFilter
from shoal.fields.retrieve.index.osq.attributes import (
    AttributeCells,
    FilterProgram,
    compiled,
    quantised,
)
from shoal.fields.retrieve.index.osq.partition import balanced_parts
from shoal.fields.retrieve.index.osq.quantise import MOST_BITS, allocate_bits, cell_bounds
from shoal.fields.retrieve.index.protocols import Hits, Metric, VectorIndexError
from shoal.fields.retrieve.index.vectors import checked_vectors

_FLAGS = ("-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-mprefer-vector-width=512")
STORED = {"float32": 0, "float16": 1, "uint8": 2}
"""Types of vectors that are used where they lie -> what the kernel calls them."""
_STATS = ("parts", "passed", "bounded", "compared", "verified")
# Rows that are rotated at a time, and from which the cells of a part are learned.
_BLOCK, _SAMPLE = 8192, 32_768
_MOST = 65_536

SearchMode = Literal["fast", "exact"]


@functools.cache
def native() -> ctypes.CDLL:
    """The library.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    library = build(source, name="osq", flags=_FLAGS)
    p, n, f = c_void_p, c_int64, c_double
    program = [p, n, n, p, p, p]
    kinds: dict[str, tuple[Any, list[Any]]] = {
        "pack": (None, [p, n, n, n, n, n, p]),
        "unpack": (None, [p, n, n, n, n, n, p]),
        "encode": (None, [p, n, n, p, p, n, p, n, n, p, p]),
        "new": (p, [n, n, n, n, p, p, p, p]),
        "free": (None, [p]),
        "part": (None, [p, n, n, n, n, p, p, p, p, p]),
        "tags": (None, [p, p, n]),
        "attribute": (None, [p, n, n, n, p, p, p]),
        "filter": (n, [p, *program, n, n, p]),
        "search": (None, [p, p, n, n, f, f, f, n, *program, n, p, p, p]),
        "search_part": (None, [p, n, p, n, f, f, n, p, p, p, p]),
        "bounds": (None, [p, n, p, p, p]),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(library, f"osq_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@dataclass(frozen=True)
class CodedPart:
    """A part of the vectors as codes.

    Args:
        begin: its first row, in the order of parts.
        rotation: float32 [d, d], a column for each axis: eigenvectors of its covariance.
        bits: uint8 [d], of each axis.
        low: float32 [cells], least value of each cell, axis by axis; above ``high`` if it is empty.
        high: float32 [cells].
        records: uint64 [n, words]: of a row, which rotated values are above 0, a bit for each, then
            its codes, end to end in words of the segment; both lie in one line of a cache.
    """

    begin: int
    rotation: np.ndarray
    bits: np.ndarray
    low: np.ndarray
    high: np.ndarray
    records: np.ndarray

    def __len__(self) -> int:
        return len(self.records)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of them, by name."""
        return {name: one for name, one in vars(self).items() if name != "begin"}


@dataclass(frozen=True)
class IndexArrays:
    """What an index is made of besides its parts.

    Args:
        rows: int32 [n], row of the vectors of each row in the order of parts.
        centroids: float32 [parts, d].
        radii: float32 [parts], largest distance of a row from its centroid.
        begins: int64 [parts + 1], first row of each part.
        tags: [columns, n], codes of attributes.
        exact: float64 [attributes, n], read where a code does not decide.
    """

    rows: np.ndarray
    centroids: np.ndarray
    radii: np.ndarray
    begins: np.ndarray
    tags: np.ndarray
    exact: np.ndarray


class OSQIndex:
    """Vectors as a few bits for each number, in parts, with attributes that are filtered first.

    Args:
        bits_per_dim: of a vector, on average; at most 8 go to one axis.
        parts: how many, of about equal size.
        metric: ``l2``, ``ip`` (inner product) or ``cosine``.
        segment_bits: of a word, in which codes lie end to end: 8, 16, 32 or 64.
        attribute_bits: most of a number's code.
        beta: parts are visited that are at most so many times as far as the nearest.
        keep: share of a part's rows that pass the filter and are kept by their signs.
        rerank: times ``k`` rows of a part are compared exactly.
        seed: of parts and samples.

    Raises:
        VectorIndexError: an option is out of range.
        BuildError: there is no compiler.
    """

    def __init__(
        self,
        bits_per_dim: float = 4.0,
        parts: int = 10,
        *,
        metric: Metric = "l2",
        segment_bits: int = 64,
        attribute_bits: int = 8,
        beta: float = 1.15,
        keep: float = 0.1,
        rerank: float = 2.0,
        seed: int = 0,
    ) -> None:
        if not 0 < bits_per_dim <= MOST_BITS:
            raise VectorIndexError(
                f"bits_per_dim = {bits_per_dim}: expected above 0 and at most {MOST_BITS}, which "
                "is all that a dimension can take"
            )
        if parts < 1 or segment_bits not in (8, 16, 32, 64) or not 1 <= attribute_bits <= 16:
            raise VectorIndexError(
                f"parts = {parts}, segment_bits = {segment_bits}, attribute_bits = "
                f"{attribute_bits}: expected parts of at least 1, segments of 8, 16, 32 or 64 "
                "bits, attributes of 1 to 16"
            )
        if metric not in ("l2", "ip", "cosine"):
            raise VectorIndexError(f"metric = {metric!r}: expected l2, ip or cosine")
        self.options = {
            "bits_per_dim": bits_per_dim, "parts": parts, "metric": metric,
            "segment_bits": segment_bits, "attribute_bits": attribute_bits, "beta": beta,
            "keep": keep, "rerank": rerank, "seed": seed,
        }  # fmt: skip
        self.metric, self.beta, self.keep, self.rerank = metric, beta, keep, rerank
        self._check_effort(1, beta, keep, rerank, "fast", 1)
        self._native = native()
        self._index: int | None = None
        self.dim, self.longest = 0, 0.0
        self.cells: list[AttributeCells] = []
        self.parts: list[CodedPart] = []

    def __del__(self) -> None:
        if index := getattr(self, "_index", None):
            self._native.osq_free(index)

    def __len__(self) -> int:
        return int(self.arrays.begins[-1]) if self._index else 0

    # Building

    def build(self, vectors: Any, *, attributes: Any = None, threads: int = 1) -> None:
        """Index vectors, whose ids are their rows; what was indexed before is forgotten.

        Args:
            vectors: [N, d]; float32, float16 and uint8 are used where they lie, and may be
                memory-mapped: searches read the rows that they compare.
            attributes: of the rows: a table of Arrow, or columns by name, with numbers, text or
                true and false; null for none.
            threads: that share the parts.

        Raises:
            VectorIndexError: there are none, or numbers that are not finite; attributes of another
                number of rows, or of another type.
        """
        stored = self._stored(vectors)
        given = {} if attributes is None else attributes
        coded = quantised(given, len(stored), int(self.options["attribute_bits"]))
        labels = balanced_parts(
            stored, min(int(self.options["parts"]), len(stored)), seed=int(self.options["seed"])
        )
        order = np.argsort(labels, kind="stable").astype(np.int32)
        counts = np.bincount(labels)
        counts = counts[counts > 0]
        begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        with ThreadPoolExecutor(threads) as pool:
            made = list(
                pool.map(
                    lambda p: self._encode(stored, order, int(begins[p]), int(begins[p + 1])),
                    range(len(counts)),
                )
            )
        bits = [one.cells.bits for one in coded]
        segment = 8 if max(bits, default=0) <= 8 else 16
        columns = -(-sum(bits) // segment)
        tags = np.zeros((columns, len(stored)), f"u{segment // 8}")
        for at, one in zip(np.cumsum([0, *bits]), coded, strict=False):
            self._pack(tags, int(at), one.cells.bits, np.ascontiguousarray(one.codes[order]))
        exact = np.array([one.exact[order] for one in coded]).reshape(len(coded), len(stored))
        arrays = IndexArrays(
            rows=order,
            centroids=np.stack([centroid for _, centroid, _ in made]),
            radii=np.array([radius for *_, radius in made], np.float32),
            begins=begins,
            tags=tags,
            exact=exact,
        )
        self.assemble(stored, arrays, [part for part, *_ in made], [one.cells for one in coded])

    def _stored(self, vectors: Any) -> np.ndarray:
        rows: np.ndarray = np.asanyarray(vectors)
        if rows.ndim != 2 or not rows.size:
            raise VectorIndexError(f"vectors: {list(rows.shape)}; expected [N, d], at least one")
        if len(rows) >= 2**31:
            raise VectorIndexError(f"vectors: {len(rows)} rows; expected less than 2^31")
        if self.metric != "l2" or rows.dtype.name not in STORED or not rows.flags.c_contiguous:
            rows = checked_vectors(rows, rows.shape[1], self.metric)
        elif rows.dtype.kind == "f":
            for begin in range(0, len(rows), _BLOCK):
                checked_vectors(rows[begin : begin + _BLOCK], rows.shape[1], "l2")
        self.longest = 0.0
        if self.metric == "ip":
            # The nearest of vectors of one length has the largest product (Bachrach et al., 2014).
            squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
            self.longest = float(squares.max())
            more = np.sqrt(self.longest - squares).astype(np.float32)
            rows = np.concatenate([rows, more[:, None]], axis=1)
        return rows

    def _encode(
        self, stored: np.ndarray, order: np.ndarray, begin: int, end: int
    ) -> tuple[CodedPart, np.ndarray, float]:
        """A part, its centroid and its radius."""
        members, dim = order[begin:end], stored.shape[1]
        count, segment = len(members), self.segment_bits
        blocks = [members[at : at + _BLOCK] for at in range(0, count, _BLOCK)]
        total = np.zeros(dim)
        for block in blocks:
            total += stored[block].sum(axis=0, dtype=np.float64)
        centroid = (total / count).astype(np.float32)
        covariance = np.zeros((dim, dim))
        for block in blocks:
            apart = stored[block].astype(np.float32) - centroid
            covariance += apart.T @ apart
        energies, axes = np.linalg.eigh(covariance / count)
        # The least energies are noise of the covariance's rounding.
        energies[energies < energies.max() * 1e-9] = 0
        rotation = np.ascontiguousarray(axes[:, ::-1], np.float32)
        bits = allocate_bits(energies[::-1], round(float(self.options["bits_per_dim"]) * dim))
        draw = generator(int(self.options["seed"]), purpose="osq cells", index=begin)
        some = members[np.sort(draw.choice(count, min(count, _SAMPLE), replace=False))]
        values = np.sort(rotation.T @ (stored[some].astype(np.float32) - centroid).T, axis=1)
        bounds = [cell_bounds(one, 1 << int(b)) for one, b in zip(values, bits, strict=True)]
        flat, cells = np.concatenate(bounds).astype(np.float32), int((1 << bits.astype(int)).sum())
        low, high = np.full(cells, np.inf, np.float32), np.full(cells, -np.inf, np.float32)
        columns = max(1, -(-int(bits.sum()) // segment))
        records = np.zeros((count, -(-dim // 64) + -(-columns * segment // 64)), np.uint64)
        radius = 0.0
        for at, block in zip(range(0, count, _BLOCK), blocks, strict=True):
            apart = stored[block].astype(np.float32) - centroid
            radius = max(radius, float(np.einsum("nd,nd->n", apart, apart).max()))
            turned = np.ascontiguousarray(rotation.T @ apart.T)
            self._native.osq_encode(
                turned.ctypes.data, len(block), dim, bits.ctypes.data, flat.ctypes.data, segment,
                records.ctypes.data, records.shape[1], at, low.ctypes.data, high.ctypes.data,
            )  # fmt: skip
        part = CodedPart(begin, rotation, bits, low, high, records)
        return part, centroid, radius**0.5

    def _pack(self, words: np.ndarray, bit: int, bits: int, codes: np.ndarray) -> None:
        self._native.osq_pack(
            words.ctypes.data, words.itemsize * 8, words.shape[1], len(codes), bit, bits,
            codes.ctypes.data,
        )  # fmt: skip

    def assemble(
        self,
        vectors: np.ndarray,
        arrays: IndexArrays,
        parts: Sequence[CodedPart],
        cells: Sequence[AttributeCells],
    ) -> None:
        """Search these arrays, which are kept and not copied.

        Args:
            vectors: [N, d], float32, float16 or uint8, contiguous.
            arrays: of all parts.
            parts: all, or none, when rows are only filtered.
            cells: of attributes, in the order of their codes.
        """
        self.arrays, self.parts, self.cells = arrays, list(parts), list(cells)
        self._vectors = vectors
        self.dim = vectors.shape[1]
        if self._index:
            self._native.osq_free(self._index)
        self._index = self._native.osq_new(
            self.dim, int(arrays.begins[-1]), self.segment_bits,
            STORED[vectors.dtype.name], vectors.ctypes.data, arrays.rows.ctypes.data,
            arrays.centroids.ctypes.data, arrays.radii.ctypes.data,
        )  # fmt: skip
        # One array for all: large arrays have large pages, and a search jumps in them.
        room, begin = _aligned(sum(part.records.size for part in parts)), 0
        for at, part in enumerate(self.parts):
            records = room[begin : begin + part.records.size].reshape(part.records.shape)
            records[:], begin = part.records, begin + part.records.size
            self.parts[at] = part = replace(part, records=records)
            pointers = [getattr(part, name).ctypes.data for name in part.arrays]
            columns = max(1, -(-int(part.bits.sum()) // self.segment_bits))
            self._native.osq_part(
                self._index, part.begin, len(part), columns, part.records.shape[1], *pointers
            )
        self._native.osq_tags(self._index, arrays.tags.ctypes.data, arrays.tags.itemsize * 8)
        bit = 0
        for one, exact in zip(cells, arrays.exact, strict=True):
            self._native.osq_attribute(
                self._index, one.bits, bit, len(one.low), one.low.ctypes.data,
                one.high.ctypes.data, exact.ctypes.data,
            )  # fmt: skip
            bit += one.bits

    # Searching

    def search(
        self,
        queries: Any,
        k: int,
        *,
        where: PointFilter | None = None,
        mode: SearchMode = "fast",
        beta: float | None = None,
        keep: float | None = None,
        rerank: float | None = None,
        threads: int = 1,
    ) -> Hits:
        """The nearest rows that pass a filter.

        Args:
            queries: float32 [Q, d], or one of [d].
            k: of each query.
            where: an expression of :func:`col`; None for all rows.
            mode: ``fast``, or ``exact``, which misses nothing.
            beta: in place of the index's.
            keep: in place of the index's.
            rerank: in place of the index's.
            threads: that share the queries.

        Returns:
            Rows [Q, k], -1 where fewer pass, and their distances (squared with ``l2``); ``stats``
            count parts, rows that passed, that were bounded, compared and verified.

        Raises:
            VectorIndexError: nothing is indexed; queries of another length or not finite; a filter
                of an attribute that is not there, or that holds values of another type.
        """
        beta = self.beta if beta is None else beta
        keep = self.keep if keep is None else keep
        rerank = self.rerank if rerank is None else rerank
        self._check_effort(k, beta, keep, rerank, mode, threads)
        asked = self.queries(queries)
        program = self.program(where)
        ids, apart = np.empty((len(asked), k), np.int64), np.empty((len(asked), k), np.float32)
        stats = np.zeros((len(asked), len(_STATS)), np.int64)
        self._native.osq_search(
            self._index, asked.ctypes.data, len(asked), k, beta, keep, rerank, mode == "exact",
            *_pointers(program), threads, ids.ctypes.data, apart.ctypes.data, stats.ctypes.data,
        )  # fmt: skip
        self.restore(asked, ids, apart)
        return Hits(ids, apart, dict(zip(_STATS, stats.T, strict=True)))

    def search_part(
        self, part: int, query: np.ndarray, k: int, bitmap: np.ndarray, *, exact: bool = False
    ) -> Hits:
        """The nearest rows of one of the parts of :meth:`assemble`, among those of a bitmap.

        Args:
            part: its place among those given.
            query: float32 [d], of :meth:`queries`.
            k: how many.
            bitmap: uint64, a bit for each row of the part.
            exact: miss nothing.
        """
        ids, apart = np.empty((1, k), np.int64), np.empty((1, k), np.float32)
        stats = np.zeros((1, len(_STATS)), np.int64)
        self._native.osq_search_part(
            self._index, part, query.ctypes.data, k, self.keep, self.rerank, exact,
            bitmap.ctypes.data, ids.ctypes.data, apart.ctypes.data, stats.ctypes.data,
        )  # fmt: skip
        return Hits(ids, apart, dict(zip(_STATS, stats.T, strict=True)))

    def queries(self, queries: Any) -> np.ndarray:
        """Queries as the kernel takes them, float32 [Q, dim].

        Raises:
            VectorIndexError: nothing is indexed; another length; numbers that are not finite.
        """
        if not self._index:
            raise VectorIndexError("osq: nothing is indexed; call build(vectors) first")
        more = self.metric == "ip"
        asked = np.atleast_2d(np.asarray(queries))
        asked = checked_vectors(asked, self.dim - more, self.metric)
        return np.concatenate([asked, np.zeros((len(asked), 1), np.float32)], 1) if more else asked

    def program(self, where: PointFilter | None) -> FilterProgram:
        """A filter for the kernel.

        Raises:
            VectorIndexError: it does not fit the attributes.
        """
        if where is not None and not isinstance(where, PointFilter):
            raise VectorIndexError(f"where: {where!r}; expected an expression of col(name)")
        return compiled(where, self.cells)

    def filter(self, where: PointFilter) -> np.ndarray:
        """Which rows pass, bool [N], in the order of the vectors."""
        rows = self.arrays.rows
        bitmap = self.bitmap(self.program(where), 0, len(rows))
        passed = np.empty(len(rows), bool)
        passed[rows] = np.unpackbits(bitmap.view(np.uint8), bitorder="little")[: len(rows)]
        return passed

    def bitmap(self, program: FilterProgram, begin: int, count: int) -> np.ndarray:
        """Bits, uint64, of the rows in the order of parts that pass."""
        bits = np.zeros(-(-count // 64), np.uint64)
        if len(program.steps):
            self._native.osq_filter(
                self._index, *_pointers(program), begin, count, bits.ctypes.data
            )
        else:
            bits[:] = np.iinfo(np.uint64).max
            bits[-1] >>= np.uint64(-count % 64)
        return bits

    def visits(
        self,
        query: np.ndarray,
        k: int,
        program: FilterProgram,
        bitmaps: dict[int, np.ndarray],
        *,
        exact: bool = False,
    ) -> list[int]:
        """Parts that a query visits: the near ones, and further ones until ``k`` rows pass.

        Args:
            query: float32 [d], of :meth:`queries`.
            k: neighbours.
            program: of the filter.
            bitmaps: part -> its rows that pass; those that are looked at are added.
            exact: all that have such rows.
        """
        begins = self.arrays.begins
        apart = np.linalg.norm(self.arrays.centroids - query, axis=1)
        chosen, issued = [], 0
        for part in map(int, np.argsort(apart, kind="stable")):
            if not exact and issued >= k and apart[part] > self.beta * apart.min():
                break
            if part not in bitmaps:
                begin, end = int(begins[part]), int(begins[part + 1])
                bitmaps[part] = self.bitmap(program, begin, end - begin)
            passed = int(np.bitwise_count(bitmaps[part]).sum())
            if passed:
                chosen.append(part)
                issued += passed
        return chosen

    def restore(self, queries: np.ndarray, ids: np.ndarray, apart: np.ndarray) -> None:
        """Turn squared distances into those of the metric, in place."""
        there = ids >= 0
        if self.metric == "cosine":
            apart[there] = apart[there] / 2 - 1
        if self.metric == "ip":
            products = np.einsum("qkd,qd->qk", self._vectors[ids], queries)
            apart[there] = -products[there]

    def bounds(self, query: Any) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds, float32 [N], of the squared distances from one query."""
        asked = self.queries(query)
        lower, upper = np.empty((2, len(self)), np.float32)
        for part, one in enumerate(self.parts):
            low, high = np.empty((2, len(one)), np.float32)
            self._native.osq_bounds(
                self._index, part, asked.ctypes.data, low.ctypes.data, high.ctypes.data
            )
            rows = self.arrays.rows[one.begin : one.begin + len(one)]
            lower[rows], upper[rows] = low, high
        return lower, upper

    def memory(self) -> Mapping[str, int]:
        """Bytes of each component; vectors that are memory-mapped count as well."""
        arrays = self.arrays
        rotations = sum(one.rotation.nbytes + one.low.nbytes * 2 for one in self.parts)
        signs = 8 * -(-self.dim // 64) * sum(map(len, self.parts))
        return {
            "vectors": self._vectors.nbytes,
            "codes": sum(one.records.nbytes for one in self.parts) - signs,
            "signs": signs,
            "rotations": rotations + arrays.centroids.nbytes,
            "rows": arrays.rows.nbytes,
            "tags": arrays.tags.nbytes,
            "attributes": arrays.exact.nbytes + sum(one.low.nbytes * 2 for one in self.cells),
        }

    @property
    def vectors(self) -> np.ndarray:
        """What is compared exactly, [N, dim]."""
        return self._vectors

    @property
    def segment_bits(self) -> int:
        """Of a word of codes."""
        return int(self.options["segment_bits"])

    @staticmethod
    def _check_effort(
        k: int, beta: float, keep: float, rerank: float, mode: str, threads: int
    ) -> None:
        right = 1 <= k <= _MOST and beta >= 1 and 0 < keep <= 1 and rerank >= 1 and threads >= 1
        if not right or mode not in ("fast", "exact"):
            raise VectorIndexError(
                f"k = {k}, beta = {beta}, keep = {keep}, rerank = {rerank}, mode = {mode!r}, "
                f"threads = {threads}: expected k from 1 to {_MOST}, beta, rerank and threads of "
                "at least 1, keep above 0 and at most 1, mode fast or exact"
            )


def _pointers(program: FilterProgram) -> tuple[int, ...]:
    return (
        program.steps.ctypes.data, len(program.steps), len(program.attributes),
        program.attributes.ctypes.data, program.first.ctypes.data, program.intervals.ctypes.data,
    )  # fmt: skip


def _aligned(words: int) -> np.ndarray:
    """Zeros, uint64 [words], that begin with a line of a cache."""
    room = np.zeros(words + 8, np.uint64)
    begin = -room.ctypes.data % 64 // 8
    return room[begin : begin + words]
