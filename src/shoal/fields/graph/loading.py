"""Graphs from files, other libraries and this machine's packages."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, require
from shoal.core.files import expanded
from shoal.core.random import generator
from shoal.corpora.debian import debian_packages
from shoal.fields.graph.edge_lists import read_edge_list
from shoal.fields.graph.graph import CSRGraph, GraphError, NodeLabels

PACKAGES = "packages"
"""The data that are this machine's Debian packages."""
_PLANTED = "planted"
# Nodes of a planted community, neighbours of a node, and the share of them that are of any other.
_EACH, _DEGREE, _MIXED = 100, 10, 0.2


def read_graph(data: str, *, directed: bool = False) -> CSRGraph:
    """Read a graph.

    Args:
        data: ``packages``; ``planted:N``, see :func:`planted_graph`; a directory of
            :meth:`CSRGraph.save`; ``.npz`` (of SciPy's ``save_npz`` or with ``edge_index`` [2, E]
            and perhaps ``edge_weight``, ``num_nodes``); any other file is an edge list.
        directed: as of :meth:`CSRGraph.from_edges`; only of edge lists and ``edge_index``.

    Raises:
        DataError: it cannot be read.
        GraphError: it is no graph.
    """
    if data == PACKAGES:
        return package_graph()
    if data.partition(":")[0] == _PLANTED:
        number = data.partition(":")[2]
        require(
            number.isdecimal() and len(number) <= 7 and int(number) > 1, "data", data,
            expected="planted:N, with N from 2 to 9999999", error=GraphError,
        )  # fmt: skip
        return planted_graph(int(number))
    path = expanded(data)
    if path.is_dir():
        return CSRGraph.open(path)
    if path.suffix == ".npz":
        return _npz(path, directed)
    if not path.exists():
        raise DataError(f"{path}: there is no such file; give an edge list, .npz, or packages")
    return read_edge_list(path, directed=directed)


def graph_of(given: Any, *, directed: bool = False) -> CSRGraph:
    """A graph of what other libraries call one.

    Args:
        given: a :class:`CSRGraph`; a square sparse matrix of SciPy; a NetworkX graph; ``Data`` of
            torch-geometric or anything else with ``edge_index`` [2, E] and perhaps ``edge_weight``,
            ``num_nodes`` and ``y``; a path or name as of :func:`read_graph`.
        directed: as of :meth:`CSRGraph.from_edges`.

    Raises:
        GraphError: it is none of them, or no graph.
    """
    if isinstance(given, CSRGraph):
        return given
    if isinstance(given, str | Path):
        return read_graph(str(given), directed=directed)
    if hasattr(given, "edge_index"):
        return _edge_index(given, directed)
    if hasattr(given, "tocoo"):
        return _sparse(given, directed)
    if hasattr(given, "adjacency") and hasattr(given, "nodes"):
        return _networkx(given, directed)
    raise GraphError(
        f"graph: {type(given).__name__}; expected a CSRGraph, a sparse matrix, a NetworkX graph, "
        "something with edge_index, or a path"
    )


def package_graph(
    labels: str = "section", root: Path = Path("/"), *, directed: bool = False
) -> CSRGraph:
    """The packages of this machine's index, joined where one names another.

    An edge is a dependency, a recommendation or a suggestion, of alternatives each.

    Args:
        labels: ``section``, one for each package, or ``tags``, several for about half of them.
        root: of the system.
        directed: an edge leads from a package to one that it depends on; there are no others.

    Raises:
        DataError: there is no index.
        GraphError: other labels are wanted.
    """
    if labels not in ("section", "tags"):
        raise GraphError(f"labels = {labels!r}: expected section or tags")
    rows = debian_packages(root).rows
    place = {row.name: at for at, row in enumerate(rows)}
    pairs = [
        (at, place[to])
        for at, row in enumerate(rows)
        for to in (row.depends if directed else row.related)
        if to in place
    ]
    ends = np.array(pairs, np.int64).reshape(-1, 2)
    named = [row.tags if labels == "tags" else (row.section,) * bool(row.section) for row in rows]
    return CSRGraph.from_edges(
        ends[:, 0], ends[:, 1], ids=np.array([row.name for row in rows], str),
        labels=NodeLabels.of(named), directed=directed,
    )  # fmt: skip


def planted_graph(nodes: int, seed: int = 0) -> CSRGraph:
    """Communities of about 100 nodes, which are their labels; a fifth of the edges lead anywhere.

    Source: Condon and Karp, Algorithms for graph partitioning on the planted partition model, 2001.

    Args:
        nodes: how many, at least 2.
        seed: of communities and edges.
    """
    draw = generator(seed, purpose="planted graph")
    groups = max(2, nodes // _EACH)
    size = -(-nodes // groups)
    source = draw.integers(0, nodes, nodes * _DEGREE // 2)
    near = np.minimum(source // size * size + draw.integers(0, size, len(source)), nodes - 1)
    anywhere = draw.random(len(source)) < _MIXED
    target = np.where(anywhere, draw.integers(0, nodes, len(source)), near)
    labels = NodeLabels.of([[f"community {node // size}"] for node in range(nodes)])
    return CSRGraph.from_edges(source, target, num_nodes=nodes, labels=labels)


def read_labels(path: Path, graph: CSRGraph) -> NodeLabels:
    """Labels of a text file: an id and a label a line, an id of several labels several times.

    Args:
        path: of the file; lines that begin with ``#`` are comments.
        graph: whose nodes are labelled; labels of other nodes are passed over.

    Raises:
        DataError: it cannot be read, a line has no label, or no node of the graph has one.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    names = range(graph.num_nodes) if graph.ids is None else graph.ids.tolist()
    place = {str(name): at for at, name in enumerate(names)}
    rows: list[list[str]] = [[] for _ in range(graph.num_nodes)]
    for number, line in enumerate(lines, 1):
        fields = line.replace(",", " ").split(maxsplit=1)
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2:
            raise DataError(f"{path}: line {number}: {line[:60]!r}; expected an id and a label")
        if fields[0] in place:
            rows[place[fields[0]]].append(fields[1].strip())
    if not any(rows):
        raise DataError(f"{path}: no node of the graph has a label")
    return NodeLabels.of(rows)


def _array(value: Any) -> Any:
    """A NumPy array of a tensor, or of what is one already."""
    return None if value is None else np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def _edge_index(data: Any, directed: bool) -> CSRGraph:
    ends = _array(data.edge_index)
    if ends.ndim != 2 or len(ends) != 2:
        raise GraphError(f"edge_index: {list(ends.shape)}; expected [2, E]")
    weight, nodes = _array(getattr(data, "edge_weight", None)), getattr(data, "num_nodes", None)
    labels = _array(getattr(data, "y", None))
    nodes = None if nodes is None else int(nodes)
    graph = CSRGraph.from_edges(ends[0], ends[1], weight, num_nodes=nodes, directed=directed)
    if labels is None or labels.ndim != 1 or len(labels) != graph.num_nodes:
        return graph
    return graph.with_labels(NodeLabels.of([[str(one)] if one >= 0 else [] for one in labels]))


def _sparse(matrix: Any, directed: bool) -> CSRGraph:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise GraphError(f"matrix: {list(matrix.shape)}; expected a square one")
    entries = matrix.tocoo()
    ones = bool((entries.data == 1).all())
    weight = None if ones else entries.data
    if not directed and abs(matrix - matrix.T).nnz == 0:
        # Both halves say the same: each edge once.
        half = entries.row <= entries.col
        row, col = entries.row[half], entries.col[half]
        weight = None if weight is None else weight[half]
    else:
        row, col = entries.row, entries.col
    return CSRGraph.from_edges(row, col, weight, num_nodes=matrix.shape[0], directed=directed)


def _networkx(given: Any, directed: bool) -> CSRGraph:
    nodes = list(given.nodes)
    place = {node: at for at, node in enumerate(nodes)}
    rows = [(place[a], place[b], weight) for a, b, weight in given.edges(data="weight")]
    ends = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    weight = None
    if any(row[2] is not None for row in rows):
        weight = [1.0 if row[2] is None else row[2] for row in rows]
    whole = all(isinstance(node, int) for node in nodes)
    names = np.array(nodes, np.int64) if whole else np.array([str(node) for node in nodes], str)
    return CSRGraph.from_edges(ends[:, 0], ends[:, 1], weight, ids=names, directed=directed)


def _npz(path: Path, directed: bool) -> CSRGraph:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays: Mapping[str, np.ndarray] = {name: file[name] for name in file.files}
        if "format" in arrays:
            from scipy.sparse import load_npz

            return _sparse(load_npz(path), directed)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    if "edge_index" not in arrays:
        raise DataError(f"{path}: expected a sparse matrix of SciPy, or edge_index [2, E]")
    ends = arrays["edge_index"]
    if ends.ndim != 2 or len(ends) != 2:
        raise GraphError(f"{path}: edge_index: {list(ends.shape)}; expected [2, E]")
    nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else None
    return CSRGraph.from_edges(
        ends[0], ends[1], arrays.get("edge_weight"), num_nodes=nodes, directed=directed
    )
