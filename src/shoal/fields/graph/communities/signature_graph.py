"""A graph as signatures of its vertices' sets of neighbours, and queries of communities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, nearest, require
from shoal.core.files import write_dir_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.data.minhash import Bands, bands_reaching
from shoal.fields.data.minhash.lsh import band_keys
from shoal.fields.graph.communities.adjacency import Side
from shoal.fields.graph.communities.building import SignatureBuilder, check_room
from shoal.fields.graph.communities.native import band_mates, equal_slots, follow_slots
from shoal.fields.graph.communities.protocols import CommunityError, CommunityExpander
from shoal.fields.graph.communities.shards import (
    add_graph,
    add_named,
    add_shard,
    shards_of,
)
from shoal.fields.graph.communities.walktrap import walktrap
from shoal.fields.graph.graph import CSRGraph

_SCALARS = "signatures.json"
_ARRAYS = ("ids", "signatures", "degrees", "bands", "others", "other_degrees")
_LOW = np.uint64(0xFFFFFFFF)

MOST_CANDIDATES = 4096
"""Vertices that a query compares with its seeds, unless ``most`` of the graph says otherwise."""

Edges = CSRGraph | Iterable[tuple[Any, Any]]
"""A graph, or shards of edges: int [E] sources and int [E] targets each."""


@dataclass(frozen=True)
class Community:
    """Who belongs to some seeds.

    Args:
        seeds: their names, in the order of the query.
        added: names of the others, in the order in which they were chosen.
        scores: float64, of those that were added.
        candidates: vertices that were compared with the seeds.
    """

    seeds: np.ndarray
    added: np.ndarray
    scores: np.ndarray
    candidates: int

    @property
    def members(self) -> np.ndarray:
        """Seeds, and those that were added."""
        return np.concatenate([self.seeds, self.added])


@dataclass(frozen=True)
class CommunityView:
    """A weighted graph among some vertices, and its groups.

    Args:
        names: [n].
        weights: float64 [n, n], estimated similarities; none of a vertex with itself.
        groups: int64 [n], numbered by their first vertex.
    """

    names: np.ndarray
    weights: np.ndarray
    groups: np.ndarray


class SignatureGraph:
    """Signatures of vertices, and bands of them in which similar ones are found.

    Made by :meth:`from_edges` or :meth:`open`.

    Source: Chamberlain et al., Real-Time Community Detection in Large Social Networks on a Laptop,
    2016.

    Args:
        ids: names of the n vertices that have a signature, int64 or text, ascending.
        signatures: uint32 [n, K].
        degrees: int64 [n], members of each set; an edge that is given again counts again.
        cut: of the bands.
        seed: of the hash functions.
        least_degree: members that a vertex with a signature had, at least.
        others: names of known vertices without one, ascending.
        other_degrees: int64, of these.
        bands: uint64 [b, n], ascending in each band: half a key, then a row; None to make them.

    Attributes:
        most: candidates that a query looks at, those that share most bands with the seeds.

    Raises:
        ConfigError: the bands need more slots than there are.
    """

    def __init__(
        self,
        ids: np.ndarray,
        signatures: np.ndarray,
        degrees: np.ndarray,
        *,
        cut: Bands,
        seed: int = 1,
        least_degree: int = 1,
        others: np.ndarray | None = None,
        other_degrees: np.ndarray | None = None,
        bands: np.ndarray | None = None,
    ) -> None:
        self.ids, self.signatures, self.degrees = ids, signatures, degrees
        self.cut, self.seed, self.least_degree = cut, seed, least_degree
        self.others = ids[:0] if others is None else others
        self.other_degrees = degrees[:0] if other_degrees is None else other_degrees
        self.bands = self._sorted_bands() if bands is None else bands
        self.most = MOST_CANDIDATES

    @classmethod
    def from_edges(
        cls,
        edges: Edges,
        *,
        side: Side = "both",
        hashes: int = 1000,
        least_degree: int = 1,
        threshold: float = 0.1,
        recall: float = 0.9,
        bands: tuple[int, int] | None = None,
        seed: int = 1,
        threads: int = 1,
    ) -> SignatureGraph:
        """Sign the sets of neighbours of all vertices that have enough of them.

        Edges may come in any order and any number of shards, and more than once; those from a
        vertex to itself are left out.

        Args:
            edges: a CSRGraph, or shards of edges: pairs of int arrays, sources and targets.
            side: the set of a vertex are those with an edge to it (``in``), those to which it has
                one (``out``), or ``both``.
            hashes: slots of a signature; the standard error of a similarity J is
                sqrt(J (1 - J) / hashes).
            least_degree: of a vertex that is signed.
            threshold: similarity at which candidates should be found.
            recall: probability of that, for one seed.
            bands: how many, and slots of each, instead of threshold and recall.
            seed: of the hash functions.
            threads: that work; the result does not depend on them.

        Raises:
            CommunityError: edges of another form; no vertex has enough neighbours; signatures do
                not fit in memory.
            ConfigError: a number beyond its range.
        """
        require(
            side in ("in", "out", "both"), "side", side, expected="in, out or both",
            error=CommunityError,
        )  # fmt: skip
        for name, value in (("least_degree", least_degree), ("threads", threads)):
            require(value >= 1, name, value, expected="at least 1", error=CommunityError)
        builder = SignatureBuilder(hashes, seed=seed, threads=threads)
        if bands is None:
            cut = bands_reaching(threshold, recall, hashes)
        else:
            cut = Bands(*bands)
            require(
                min(cut) > 0, "bands", bands, expected="two numbers above 0", error=CommunityError
            )
            # With the message that bands of too many slots have.
            band_keys(np.empty((0, hashes), np.uint32), cut)
        given: dict[str, np.ndarray] = {}
        if isinstance(edges, CSRGraph):
            signed, given = add_graph(builder, edges, side, least_degree)
        else:
            for number, shard in shards_of(edges):
                add_shard(builder, shard, number, side)
            signed = builder.ids
        signatures, degrees = builder.signatures, builder.degrees
        enough = degrees >= least_degree
        if not enough.all():
            given["others"], given["other_degrees"] = signed[~enough], degrees[~enough]
            signed, signatures, degrees = signed[enough], signatures[enough], degrees[enough]
        if not len(signed):
            raise CommunityError(
                f"edges: no vertex has {least_degree} neighbours; expected at least one that has"
            )
        if len(signed) > 1 and not bool((signed[1:] > signed[:-1]).all()):
            order = np.argsort(signed, kind="stable")
            signed, signatures, degrees = signed[order], signatures[order], degrees[order]
        return cls(
            signed, signatures, degrees, cut=cut, seed=seed, least_degree=least_degree, **given
        )

    # What it is

    @property
    def num_vertices(self) -> int:
        """Vertices with a signature."""
        return len(self.ids)

    @property
    def hashes(self) -> int:
        """Slots of a signature."""
        return int(self.signatures.shape[1])

    def memory(self) -> dict[str, int]:
        """Bytes of each array."""
        return {name: int(getattr(self, name).nbytes) for name in _ARRAYS}

    # Queries

    def expand(
        self,
        seeds: Sequence[Any] | np.ndarray,
        size: int,
        method: str | Choice | Any = "mean_similarity",
    ) -> Community:
        """The community of some seeds.

        Args:
            seeds: names of vertices; a repetition counts once.
            size: vertices of the community, seeds included; there are fewer where there are not so
                many candidates.
            method: a part of kind ``community_expander``: its name, a choice with options, or
                itself.

        Raises:
            CommunityError: no seeds; one that is unknown, or has too few neighbours; a size of no
                more than the seeds.
        """
        rows = self.rows_of(seeds)
        require(
            size > len(rows), "size", size, expected=f"more than the {len(rows)} seeds",
            error=CommunityError,
        )  # fmt: skip
        part: CommunityExpander = (
            table("community_expander").build(method, where="method")
            if isinstance(method, str | Choice)
            else method
        )
        chosen = part.expand(self, rows, size - len(rows))
        return Community(self.ids[rows], self.ids[chosen.rows], chosen.scores, chosen.candidates)

    def view(self, names: Sequence[Any] | np.ndarray, *, steps: int = 4) -> CommunityView:
        """The similarities among some vertices, and groups of those that a walk keeps together.

        Args:
            names: of the vertices, such as the members of a community.
            steps: of the walk.

        Raises:
            CommunityError: a vertex that is unknown, or has too few neighbours.
        """
        rows = self.rows_of(names)
        weights = self.similarity(rows, rows)
        np.fill_diagonal(weights, 0.0)
        return CommunityView(self.ids[rows], weights, walktrap(weights, steps=steps))

    def rows_of(self, names: Sequence[Any] | np.ndarray) -> np.ndarray:
        """Rows of vertices, int64, in their order, each once.

        Args:
            names: as in ``ids``; whole numbers may be text.

        Raises:
            CommunityError: none are given; one is unknown, or has too few neighbours.
        """
        rows = list(dict.fromkeys(self._row(name) for name in names))
        require(len(rows) > 0, "seeds", [], expected="at least one vertex", error=CommunityError)
        return np.array(rows, np.int64)

    def _row(self, name: Any) -> int:
        wanted = name if isinstance(name, str) else getattr(name, "item", lambda: name)()
        if self.ids.dtype.kind != "U":
            try:
                wanted = int(wanted)
            except (TypeError, ValueError):
                wanted = -1
            wanted = min(max(wanted, -1), 2**63 - 1)
        else:
            wanted = str(wanted)
        at = _place(self.ids, wanted)
        if at is not None:
            return at
        other = _place(self.others, wanted)
        if other is not None:
            raise CommunityError(
                f"vertex {name!r} has {self.other_degrees[other]} neighbours: expected at least "
                f"{self.least_degree}, so that it has a signature"
            )
        hint = self._nearest(wanted)
        raise CommunityError(f"vertex {name!r}: there is none of this name{hint}")

    def _nearest(self, wanted: Any) -> str:
        """Vertices with a similar name, as the end of a sentence."""
        at = int(np.searchsorted(self.ids, wanted))
        if not isinstance(wanted, str):
            around = self.ids[max(at - 1, 0) : at + 1].tolist()
            return f"; the nearest are {' and '.join(map(str, around))}"
        # Names that begin alike, for all of them would take too long.
        begin, end = (
            int(np.searchsorted(self.ids, wanted[:1] + tail)) for tail in ("", "\U0010ffff")
        )
        hint = nearest(wanted, self.ids[begin:end].tolist(), most=3)
        return f"; {hint}" if hint else ""

    # Similarities

    def candidates(self, seeds: np.ndarray) -> np.ndarray:
        """Rows that share a band with a seed, ascending; at most ``most``.

        Raises:
            DataError: a file that is mapped is damaged.
        """
        keys = band_keys(self.signatures[seeds], self.cut)
        shared, wrong = band_mates(self.bands, keys)
        require(wrong == 0, "bands", f"{wrong} rows", expected="rows that exist", error=DataError)
        shared[seeds] = 0
        rows = np.flatnonzero(shared)
        if len(rows) > self.most:
            rows = np.sort(rows[np.argsort(-shared[rows], kind="stable")[: self.most]])
        return rows

    def similarity(self, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Share of slots in which rows agree with others, float64 [n, m]."""
        return equal_slots(self.signatures, rows, others) / self.hashes

    def union(self, rows: np.ndarray, candidates: np.ndarray) -> SignatureUnion:
        """The union of the sets of some rows."""
        return SignatureUnion(self.signatures[rows], self.signatures[candidates])

    # Changes

    def insert(self, edges: Iterable[tuple[Any, Any]], *, side: Side = "both") -> int:
        """Add edges; the result is that of :meth:`from_edges` with all edges.

        A vertex that had too few neighbours for a signature, but some, does not get one; where
        edges are to be left out, or such vertices to come in, build anew.

        Args:
            edges: shards of sources and targets, ids or names.
            side: as it was.

        Returns:
            How many vertices the edges have touched that have no signature.

        Raises:
            CommunityError: edges of another form.
        """
        builder = SignatureBuilder(self.hashes, seed=self.seed)
        names = add_named(builder, edges, self.ids.dtype.kind, side)
        if not len(names):
            return 0
        new, degrees = builder.signatures, builder.degrees
        place, there = _places(self.ids, names)
        self._lower(place[there], new[there], degrees[there])
        names, new, degrees = names[~there], new[~there], degrees[~there]
        place, known = _places(self.others, names)
        started = np.zeros(len(names), bool)
        started[known] = self.other_degrees[place[known]] > 0
        counted = self.other_degrees.copy()
        counted[place[known]] += degrees[known]
        ready = ~started & (degrees >= self.least_degree)
        kept = np.ones(len(counted), bool)
        kept[place[known & ready]] = False
        late = ~known & ~ready
        others = np.concatenate([self.others[kept], names[late]])
        order = np.argsort(others, kind="stable")
        self.others = others[order]
        self.other_degrees = np.concatenate([counted[kept], degrees[late]])[order]
        if ready.any():
            check_room(len(self.ids) + int(ready.sum()), self.hashes)
            ids = np.concatenate([self.ids, names[ready]])
            order = np.argsort(ids, kind="stable")
            self.ids = ids[order]
            self.signatures = np.concatenate([self.signatures, new[ready]])[order]
            self.degrees = np.concatenate([self.degrees, degrees[ready]])[order]
            self.bands = self._sorted_bands()
        return int((~ready).sum())

    def _lower(self, rows: np.ndarray, new: np.ndarray, degrees: np.ndarray) -> None:
        """Put more members into sets, and their new keys into the bands."""
        for name in ("signatures", "degrees", "bands"):
            if not getattr(self, name).flags.writeable:
                setattr(self, name, np.array(getattr(self, name)))
        self.degrees[rows] += degrees
        before = self.signatures[rows]
        after = np.minimum(before, new)
        self.signatures[rows] = after
        old, fresh = (self._entries(one, rows) for one in (before, after))
        for band in np.flatnonzero((old != fresh).any(axis=1)):
            changed = old[band] != fresh[band]
            at = np.searchsorted(self.bands[band], old[band][changed])
            self.bands[band, at] = fresh[band][changed]
            self.bands[band].sort()

    def _entries(self, signatures: np.ndarray, rows: np.ndarray) -> np.ndarray:
        keys = band_keys(signatures, self.cut)
        keys &= ~_LOW
        keys |= rows.astype(np.uint64)
        return keys

    def _sorted_bands(self) -> np.ndarray:
        entries = self._entries(self.signatures, np.arange(len(self.ids)))
        entries.sort(axis=1)
        return entries

    # Files

    def save(self, directory: Path) -> Path:
        """Write a directory of .npy files that :meth:`open` maps; the same path.

        Raises:
            DataError: it exists, or cannot be written.
        """
        with write_dir_atomic(directory, error=DataError) as place:
            for name in _ARRAYS:
                np.save(place / f"{name}.npy", getattr(self, name), allow_pickle=False)
            scalars = {"cut": self.cut, "seed": self.seed, "least_degree": self.least_degree}
            write_json(place / _SCALARS, scalars)
        return directory

    @classmethod
    def open(cls, directory: Path) -> SignatureGraph:
        """Signatures that were saved; their arrays are mapped, not read.

        Raises:
            DataError: the directory is none of signatures, or is damaged.
        """
        try:
            scalars = json.loads((directory / _SCALARS).read_bytes())
            arrays = {
                name: np.load(directory / f"{name}.npy", mmap_mode="r", allow_pickle=False)
                for name in _ARRAYS
            }
            cut = Bands(*(int(one) for one in scalars["cut"]))
            graph = cls(
                **arrays, cut=cut, seed=int(scalars["seed"]),
                least_degree=int(scalars["least_degree"]),
            )  # fmt: skip
        except (OSError, EOFError, KeyError, TypeError, ValueError) as cause:
            raise DataError(f"{directory}: not a graph of signatures: {cause}") from cause
        graph.check_integrity(str(directory))
        return graph

    def check_integrity(self, where: str = "signatures") -> None:
        """Refuse arrays that do not fit together.

        Raises:
            DataError: they do not; names the array.
        """
        count, slots = len(self.ids), self.cut.bands * self.cut.rows
        shapes: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {
            "signatures": (self.signatures, "<u4", (count, *self.signatures.shape[1:])),
            "degrees": (self.degrees, "<i8", (count,)),
            "bands": (self.bands, "<u8", (self.cut.bands, count)),
            "other_degrees": (self.other_degrees, "<i8", (len(self.others),)),
        }
        for name, (array, kind, shape) in shapes.items():
            fits = array.dtype == np.dtype(kind) and array.shape == shape
            require(
                fits and array.flags.c_contiguous, f"{where}: {name}",
                f"{array.dtype} {list(array.shape)}", expected=f"{kind} {list(shape)}",
                error=DataError,
            )  # fmt: skip
        require(
            self.signatures.ndim == 2 and min(self.cut) > 0 and slots <= self.hashes,
            f"{where}: cut", tuple(self.cut), expected="bands within the signature",
            error=DataError,
        )  # fmt: skip
        for name, array in (("ids", self.ids), ("others", self.others)):
            ascending = array.ndim == 1 and bool((array[1:] > array[:-1]).all())
            require(
                ascending and array.dtype.kind in "iU", f"{where}: {name}", str(array.dtype),
                expected="names in ascending order", error=DataError,
            )  # fmt: skip


class SignatureUnion:
    """The union of a community's sets, by the least of each slot.

    Args:
        members: uint32 [m, K], signatures in the community.
        candidates: uint32 [n, K].
    """

    def __init__(self, members: np.ndarray, candidates: np.ndarray) -> None:
        self._merged, self._candidates = members.min(axis=0), candidates
        self._equal = (candidates == self._merged).sum(axis=1).astype(np.int32)

    def scores(self) -> np.ndarray:
        """Jaccard similarity of the union with each candidate."""
        return np.asarray(self._equal / len(self._merged))

    def add(self, at: int) -> None:
        """Put the set of a candidate into the union."""
        after = np.minimum(self._merged, self._candidates[at])
        follow_slots(self._candidates, self._merged, after, self._equal)
        self._merged = after


def _places(names: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where wanted names are among others, ascending, and whether they are."""
    if not len(names):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    place = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    return place, np.asarray(names[place] == wanted)


def _place(names: np.ndarray, wanted: Any) -> int | None:
    at = int(np.searchsorted(names, wanted)) if len(names) else 0
    return at if at < len(names) and names[at] == wanted else None
