"""A graph in compressed rows, in memory or mapped from files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_dir_atomic, write_json
from shoal.core.random import generator

_SCALARS = "graph.json"


class GraphError(ConfigError, ValueError):
    """Edges, weights or labels that a graph cannot have."""


@dataclass(frozen=True)
class NodeLabels:
    """Which labels a node has: none, one or several.

    Args:
        indptr: int64 [N + 1]; the labels of node ``i`` are ``indices[indptr[i]:indptr[i + 1]]``.
        indices: int32, places in ``names``.
        names: of the labels.
    """

    indptr: np.ndarray
    indices: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]]) -> NodeLabels:
        """Labels of lists of names, one list for each node."""
        names = tuple(sorted({one for row in rows for one in row}))
        place = {name: at for at, name in enumerate(names)}
        sizes = [len(set(row)) for row in rows]
        indices = [place[one] for row in rows for one in sorted(set(row))]
        return cls(_pointer(sizes), np.array(indices, np.int32), names)

    @property
    def num_nodes(self) -> int:
        """Nodes, those without a label included."""
        return len(self.indptr) - 1

    @property
    def labelled(self) -> np.ndarray:
        """Nodes with a label, int64, ascending."""
        return np.flatnonzero(np.diff(self.indptr))

    @property
    def single(self) -> bool:
        """No node has more than one."""
        return bool((np.diff(self.indptr) <= 1).all())

    def take(self, nodes: np.ndarray) -> NodeLabels:
        """The labels of some nodes, in their order."""
        sizes = np.diff(self.indptr)[nodes]
        return NodeLabels(
            _pointer(sizes), self.indices[_ranges(self.indptr[nodes], sizes)], self.names
        )

    def dense(self) -> np.ndarray:
        """Bool [N, L]."""
        result = np.zeros((self.num_nodes, len(self.names)), bool)
        result[np.repeat(np.arange(self.num_nodes), np.diff(self.indptr)), self.indices] = True
        return result


@dataclass(frozen=True)
class CSRGraph:
    """Nodes and weighted edges in compressed sparse rows.

    Args:
        indptr: int64 [N + 1].
        indices: int32 or int64 [nnz], ascending in each row; an undirected edge is there twice.
        weight: float32 [nnz]; None where every edge counts 1.
        ids: [N] int64 or text, what the nodes were called; None where they are their rows.
        labels: of the nodes, if they have any.
        counts: what was left out or merged, such as ``self_loops`` and ``duplicate_edges``.
        directed: an entry of a row has none in the other direction, unless that edge is there too.
    """

    indptr: np.ndarray
    indices: np.ndarray
    weight: np.ndarray | None = None
    ids: np.ndarray | None = None
    labels: NodeLabels | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    directed: bool = False

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return len(self.indptr) - 1

    @property
    def nnz(self) -> int:
        """Entries of the adjacency matrix: twice the edges of an undirected graph."""
        return int(self.indptr[-1])

    @classmethod
    def from_edges(
        cls,
        source: Any,
        target: Any,
        weight: Any = None,
        *,
        num_nodes: int | None = None,
        ids: np.ndarray | None = None,
        labels: NodeLabels | None = None,
        directed: bool = False,
    ) -> CSRGraph:
        """A graph of a list of edges.

        A self-loop is left out. An edge that is given again, in either direction unless
        ``directed``, is merged: without weights it counts once, with weights they are added, and
        an edge of weight 0 is none. ``counts`` says how many of both there were.

        Args:
            source: int [E]; rows from 0, or any ids if ``num_nodes`` and ``ids`` are None:
                these are numbered in ascending order, and kept in ``ids``.
            target: int [E].
            weight: [E], finite; None where every edge counts 1.
            num_nodes: how many there are; None for those that edges name.
            ids: [N], what the rows are called.
            labels: of the nodes.
            directed: an edge leads from its source to its target only.

        Raises:
            GraphError: arrays of other shapes, negative or missing nodes, weights not finite.
        """
        ends = [_whole(source, "source"), _whole(target, "target")]
        if len(ends[0]) != len(ends[1]):
            raise GraphError(f"edges: {len(ends[0])} sources for {len(ends[1])} targets")
        heavy = None if weight is None else _weights(weight, len(ends[0]))
        if num_nodes is None and ids is not None:
            num_nodes = len(ids)
        if num_nodes is None:
            ids, ends = _numbered(ends)
            num_nodes = len(ids)
            if num_nodes == 0 or int(ids[-1]) == num_nodes - 1:
                ids = None
        for name, end in zip(("source", "target"), ends, strict=True):
            if len(end) and not 0 <= int(end.min()) <= int(end.max()) < num_nodes:
                wrong = end[(end < 0) | (end >= num_nodes)][0]
                raise GraphError(f"{name} = {wrong}: expected a node from 0 to {num_nodes - 1}")
        if ids is not None and len(ids) != num_nodes:
            raise GraphError(f"ids: {len(ids)} for {num_nodes} nodes")
        if labels is not None and labels.num_nodes != num_nodes:
            raise GraphError(f"labels: of {labels.num_nodes} nodes; the graph has {num_nodes}")
        loops = ends[0] == ends[1]
        if loops.any():
            ends = [end[~loops] for end in ends]
            heavy = None if heavy is None else heavy[~loops]
        indptr, indices, summed, merged = _rows(ends[0], ends[1], heavy, num_nodes, directed)
        return cls(
            indptr, indices, summed, ids, labels,
            {"self_loops": int(loops.sum()), "duplicate_edges": merged}, directed,
        )  # fmt: skip

    def degrees(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Sum of the weights of some rows, by default all, float64 [end - begin]."""
        ends = self.indptr[begin : self.num_nodes + 1 if end is None else end + 1]
        sizes = np.diff(ends)
        if self.weight is None:
            return sizes.astype(np.float64)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        return np.bincount(rows, self.weight[ends[0] : ends[-1]], minlength=len(sizes))

    def components(self) -> np.ndarray:
        """The component of each node, int32 [N], numbered by their first node."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import connected_components

        ones = np.ones(self.nnz, np.int8)
        shape = (self.num_nodes, self.num_nodes)
        matrix = csr_matrix((ones, self.indices, self.indptr), shape=shape)
        return np.asarray(connected_components(matrix, directed=True, connection="weak")[1])

    def largest_component(self) -> CSRGraph:
        """The component with the most nodes, the first of several."""
        if not self.num_nodes:
            return self
        component = self.components()
        return self.subgraph(np.flatnonzero(component == np.bincount(component).argmax()))

    def subgraph(self, nodes: np.ndarray) -> CSRGraph:
        """Some nodes, ascending, and the edges between them; their names are kept."""
        place = np.full(self.num_nodes, -1, np.int64)
        place[nodes] = np.arange(len(nodes))
        sizes = np.diff(self.indptr)[nodes]
        entries = _ranges(self.indptr[nodes], sizes)
        ends = place[self.indices[entries]]
        kept = ends >= 0
        row = np.repeat(np.arange(len(nodes)), sizes)[kept]
        return CSRGraph(
            indptr=_pointer(np.bincount(row, minlength=len(nodes))),
            indices=ends[kept].astype(_index_type(len(nodes))),
            weight=None if self.weight is None else self.weight[entries][kept],
            ids=nodes if self.ids is None else self.ids[nodes],
            labels=None if self.labels is None else self.labels.take(nodes),
            counts=self.counts,
            directed=self.directed,
        )

    def keys(self) -> np.ndarray:
        """A number of each node that its name alone decides, int64 [N]; a number is its own."""
        if self.ids is None:
            return np.arange(self.num_nodes)
        if self.ids.dtype.kind != "U":
            return np.asarray(self.ids, np.int64)
        letters = np.ascontiguousarray(self.ids).view(np.uint32).reshape(self.num_nodes, -1)
        # Multilinear hashing; the zeros that a shorter name is padded with add nothing.
        draw = generator(0, purpose="names of nodes")
        factors = draw.integers(1, 2**64 - 1, letters.shape[1], np.uint64)
        return np.asarray(letters.astype(np.uint64) @ factors).view(np.int64)

    def by_name(self) -> CSRGraph:
        """The same graph with the neighbours of each row in the order of their names."""
        if self.ids is None or bool((self.ids[1:] > self.ids[:-1]).all()):
            return self
        place = np.empty(self.num_nodes, np.int64)
        place[np.argsort(self.ids, kind="stable")] = np.arange(self.num_nodes)
        order = np.lexsort((place[self.indices], self.edges()[0]))
        weight = None if self.weight is None else self.weight[order]
        return replace(self, indices=self.indices[order], weight=weight)

    def touching(self, nodes: np.ndarray) -> np.ndarray:
        """Which rows have a neighbour among some nodes; bool [N], as the argument."""
        counted = np.concatenate([[0], np.cumsum(nodes[self.indices])])
        return np.asarray(counted[self.indptr[1:]] > counted[self.indptr[:-1]])

    def with_edges(self, source: Any, target: Any, weight: Any = None) -> CSRGraph:
        """The same graph with more edges, as :meth:`from_edges` merges them.

        Args:
            source: int [E], rows.
            target: int [E].
            weight: [E]; only if the graph has weights.

        Raises:
            GraphError: there is no such node; only one of both has weights.
        """
        if (weight is None) != (self.weight is None):
            raise GraphError("weight: give weights for the edges of a graph that has weights")
        rows, columns = self.edges()
        once = slice(None) if self.directed else rows < columns
        more = [_whole(one, name) for one, name in ((source, "source"), (target, "target"))]
        heavy = None
        if self.weight is not None:
            heavy = np.concatenate([self.weight[once], _weights(weight, len(more[0]))])
        graph = CSRGraph.from_edges(
            np.concatenate([rows[once], more[0]]), np.concatenate([columns[once], more[1]]), heavy,
            num_nodes=self.num_nodes, ids=self.ids, labels=self.labels, directed=self.directed,
        )  # fmt: skip
        counts = {name: count + self.counts.get(name, 0) for name, count in graph.counts.items()}
        return replace(graph, counts=counts)

    def with_labels(self, labels: NodeLabels) -> CSRGraph:
        """The same graph with these labels.

        Raises:
            GraphError: they are of another number of nodes.
        """
        if labels.num_nodes != self.num_nodes:
            raise GraphError(f"labels: of {labels.num_nodes} nodes; the graph has {self.num_nodes}")
        return replace(self, labels=labels)

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Source and target of each entry, int64 [nnz]."""
        rows = np.repeat(np.arange(self.num_nodes), np.diff(self.indptr))
        return rows, np.asarray(self.indices, np.int64)

    # Files

    def save(self, directory: Path) -> Path:
        """Write a directory of .npy files that :meth:`open` maps; the same path.

        Raises:
            DataError: it exists, or cannot be written.
        """
        with write_dir_atomic(directory, error=DataError) as place:
            for name, array in self._arrays().items():
                np.save(place / f"{name}.npy", array, allow_pickle=False)
            names = None if self.labels is None else list(self.labels.names)
            scalars = {"counts": dict(self.counts), "directed": self.directed, "labels": names}
            write_json(place / _SCALARS, scalars)
        return directory

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {
            "indptr": self.indptr, "indices": self.indices, "weight": self.weight, "ids": self.ids,
        }  # fmt: skip
        if self.labels is not None:
            arrays |= {"label_ptr": self.labels.indptr, "label_indices": self.labels.indices}
        return {name: array for name, array in arrays.items() if array is not None}

    @classmethod
    def open(cls, directory: Path) -> CSRGraph:
        """A graph that was saved; its arrays are mapped, not read.

        Raises:
            DataError: the directory is none of a graph, or is damaged.
        """
        try:
            scalars = json.loads((directory / _SCALARS).read_bytes())
            arrays = {
                path.stem: np.load(path, mmap_mode="r", allow_pickle=False)
                for path in sorted(directory.glob("*.npy"))
            }
            labels = None
            if scalars["labels"] is not None:
                names = tuple(map(str, scalars["labels"]))
                labels = NodeLabels(arrays["label_ptr"], arrays["label_indices"], names)
            graph = cls(
                arrays["indptr"], arrays["indices"], arrays.get("weight"), arrays.get("ids"),
                labels, dict(scalars["counts"]), bool(scalars["directed"]),
            )  # fmt: skip
        except (OSError, EOFError, KeyError, TypeError, ValueError) as cause:
            raise DataError(f"{directory}: not a graph: {cause}") from cause
        graph.check_integrity(str(directory))
        return graph

    def check_integrity(self, where: str = "graph") -> None:
        """Refuse arrays that do not fit together.

        Raises:
            DataError: they do not; names the array.
        """
        nodes = self.num_nodes

        def must(condition: bool, what: str) -> None:
            if not condition:
                raise DataError(f"{where}: {what}")

        arrays = [one for one in (self.indptr, self.indices, self.weight) if one is not None]
        must(all(one.flags.c_contiguous for one in arrays), "arrays that are not contiguous")
        must(self.indptr.ndim == 1 and nodes >= 0 and self.indptr.dtype == np.int64, "indptr")
        must(not self.indptr[0] and bool((np.diff(self.indptr) >= 0).all()), "indptr falls")
        must(self.indices.dtype in (np.int32, np.int64), f"indices are {self.indices.dtype}")
        must(self.indices.shape == (self.nnz,), f"{len(self.indices)} indices for {self.nnz}")
        inside = not self.nnz or 0 <= int(self.indices.min()) <= int(self.indices.max()) < nodes
        must(inside, f"indices outside 0 to {nodes - 1}")
        if self.weight is not None:
            fits = self.weight.shape == (self.nnz,) and self.weight.dtype == np.float32
            must(fits and bool(np.isfinite(self.weight).all()), "weight")
        must(self.ids is None or self.ids.shape == (nodes,), "ids")
        if (labels := self.labels) is not None:
            ends = len(labels.indptr) == nodes + 1 and labels.indptr[-1] == len(labels.indices)
            must(bool(ends and not labels.indptr[0]), "labels")
            must(bool((np.diff(labels.indptr) >= 0).all()), "labels")
            named = len(labels.names)
            must(bool(((labels.indices >= 0) & (labels.indices < named)).all()), "labels")


def _pointer(sizes: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _ranges(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers of several ranges, one after the other."""
    ends = np.cumsum(sizes, dtype=np.int64)
    places = np.arange(ends[-1] if len(ends) else 0)
    return np.asarray(places + np.repeat(begins - (ends - sizes), sizes))


def _index_type(nodes: int) -> type[np.int32] | type[np.int64]:
    return np.int32 if nodes <= np.iinfo(np.int32).max else np.int64


def _whole(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GraphError(f"{name}: {array.dtype} {list(array.shape)}; expected whole numbers [E]")
    if array.size and (int(array.max()) > np.iinfo(np.int64).max):
        raise GraphError(f"{name} = {array.max()}: expected at most 2^63 - 1")
    return array.astype(np.int64, copy=False)


def _weights(weight: Any, edges: int) -> np.ndarray:
    try:
        array = np.asarray(weight, np.float32)
    except (TypeError, ValueError) as cause:
        raise GraphError(f"weight: expected numbers [{edges}]: {cause}") from cause
    if array.shape != (edges,):
        raise GraphError(f"weight: {list(array.shape)}; expected [{edges}]")
    finite = np.isfinite(array)
    if not finite.all():
        at = int(finite.argmin())
        raise GraphError(f"weight[{at}] = {array[at]}: expected a finite number")
    return array


def _numbered(ends: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The ids that edges name, ascending, and the edges by their places among them."""
    if not len(ends[0]):
        return np.zeros(0, np.int64), ends
    low, high = min(int(end.min()) for end in ends), max(int(end.max()) for end in ends)
    if low < 0:
        raise GraphError(f"id {low}: expected 0 or more")
    if high < 4 * len(ends[0]) + 1024:  # a table of all ids is smaller than a sort
        there = np.zeros(high + 1, bool)
        for end in ends:
            there[end] = True
        ids = np.flatnonzero(there)
        place = np.cumsum(there) - 1
        return ids, [place[end] for end in ends]
    ids, place = np.unique(np.concatenate(ends), return_inverse=True)
    return ids, [place[: len(ends[0])], place[len(ends[0]) :]]


def _rows(
    source: np.ndarray, target: np.ndarray, weight: np.ndarray | None, nodes: int, directed: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Rows of edges without loops, and how many edges were merged into others."""
    from scipy.sparse import coo_matrix

    given = len(source)
    data = np.ones(given, np.float32) if weight is None else weight
    if not directed:
        low, high = np.minimum(source, target), np.maximum(source, target)
        source, target = low, high
    kind: Any = _index_type(nodes)
    ends: Any = (source.astype(kind, copy=False), target.astype(kind, copy=False))
    # Edges that are given again are added in the conversion.
    half = coo_matrix((data, ends), shape=(nodes, nodes)).tocsr()
    merged = given - half.nnz
    matrix = half if directed else (half + half.T).tocsr()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    indptr, indices = matrix.indptr.astype(np.int64), matrix.indices.astype(kind, copy=False)
    return indptr, indices, None if weight is None else matrix.data, merged
