"""Graphs: what becomes of edges, files of every kind, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import DataError
from shoal.fields.graph import (
    CSRGraph,
    NodeLabels,
    graph_of,
    package_graph,
    read_graph,
    read_labels,
)
from shoal.fields.graph.graph import GraphError


def matrix(graph):
    data = np.ones(graph.nnz) if graph.weight is None else graph.weight
    shape = (graph.num_nodes,) * 2
    return scipy.sparse.csr_matrix((data, graph.indices, graph.indptr), shape).toarray()


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4)), max_size=40
    ),
    directed=st.booleans(),
    heavy=st.booleans(),
)
def test_edges_become_the_matrix_of_a_loop(edges, directed, heavy):
    wanted, seen, loops, again = np.zeros((13, 13)), set(), 0, 0
    for a, b, weight in edges:
        pair = (a, b) if directed else (min(a, b), max(a, b))
        if a == b:
            loops += 1
            continue
        again += pair in seen
        if heavy or pair not in seen:
            wanted[a, b] += weight if heavy else 1
            if not directed:
                wanted[b, a] += weight if heavy else 1
        seen.add(pair)
    a, b, weight = np.array(edges, np.int64).reshape(-1, 3).T
    graph = CSRGraph.from_edges(a, b, weight if heavy else None, num_nodes=13, directed=directed)
    graph.check_integrity()
    np.testing.assert_array_equal(matrix(graph), wanted)
    assert graph.counts == {"self_loops": loops, "duplicate_edges": again}
    assert graph.indptr.dtype == np.int64 and graph.indices.dtype == np.int32
    assert all((np.diff(row) > 0).all() for row in np.split(graph.indices, graph.indptr[1:-1]))
    np.testing.assert_allclose(graph.degrees(), wanted.sum(1))
    np.testing.assert_allclose(graph.degrees(3, 7), wanted.sum(1)[3:7])


def test_large_ids_are_numbered_anew_and_kept():
    graph = CSRGraph.from_edges([2**62, 7, 2**33], [7, 2**33, 2**62])
    assert graph.ids.tolist() == [7, 2**33, 2**62] and graph.nnz == 6
    assert graph.keys().tolist() == [7, 2**33, 2**62]
    assert CSRGraph.from_edges([0, 1], [1, 2]).ids is None
    assert CSRGraph.from_edges([5, 9], [9, 6]).ids.tolist() == [5, 6, 9]


def test_empty_and_disconnected():
    empty = CSRGraph.from_edges(np.zeros(0, int), np.zeros(0, int))
    assert empty.num_nodes == empty.nnz == 0 and empty.largest_component() is empty
    graph = CSRGraph.from_edges([1, 5, 6], [2, 6, 7], num_nodes=9)
    assert graph.components().tolist() == [0, 1, 1, 2, 3, 4, 4, 4, 5]
    largest = graph.largest_component()
    assert largest.ids.tolist() == [5, 6, 7] and largest.nnz == 4
    np.testing.assert_array_equal(matrix(largest), matrix(graph)[5:8, 5:8])


@pytest.mark.parametrize("ending", ["txt", "txt.gz"])
def test_edge_lists_as_snap_has_them(tmp_path, ending):
    text = (
        "# Directed graph: x.txt\n# FromNodeId\tToNodeId\n3\t4\r\n  4   3 \n\n% more\n"
        "4,5\n5; 5\n4294967297 3\n# the end\n7 3"
    )
    path = tmp_path / f"edges.{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    graph = read_graph(str(path))
    assert graph.ids.tolist() == [3, 4, 5, 7, 2**32 + 1]
    assert graph.counts == {"self_loops": 1, "duplicate_edges": 1} and graph.nnz == 8
    directed = read_graph(str(path), directed=True)
    assert directed.counts == {"self_loops": 1, "duplicate_edges": 0} and directed.nnz == 5


def test_edge_lists_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.fields.graph.edge_lists._BLOCK", 64)
    ends = np.random.default_rng(0).integers(0, 500, (1000, 2))
    heavy = np.random.default_rng(1).integers(1, 9, 1000)
    path = tmp_path / "edges.tsv"
    path.write_text("".join(f"{a}\t{b}\t{w}\n" for (a, b), w in zip(ends, heavy, strict=True)))
    graph = read_graph(str(path))
    wanted = CSRGraph.from_edges(ends[:, 0], ends[:, 1], heavy)
    np.testing.assert_array_equal(matrix(graph), matrix(wanted))
    np.testing.assert_array_equal(graph.ids, wanted.ids)


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("3 x", ""), ("3", ""), ("3 4 5", ""), ("-1 4", ""), ("9223372036854775808 1", ""),
        ("1_0 4", ""), ("3.0 4", ""), ("1 2 nan", " 1.5"), ("1 2 inf", " 1"), ("1 2 x", " 1"),
        ("1 2", " 1"), ("\xff\xfe 1", ""),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_by_its_number(tmp_path, line, more):
    path = tmp_path / "edges.txt"
    path.write_bytes(f"# comment\n0 1{more}\n\n1 2{more}\n{line}\n".encode("latin-1"))
    with pytest.raises(DataError, match="line 5: "):
        read_graph(str(path))


def test_files_that_are_no_edge_lists(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_graph(str(tmp_path / "nothing.txt"))
    path = tmp_path / "edges.txt.gz"
    path.write_bytes(gzip.compress(b"0 1\n" * 1000)[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read_graph(str(path))
    path = tmp_path / "edges.txt"
    path.write_bytes(b"# nothing\n")
    assert read_graph(str(path)).num_nodes == 0
    path.write_bytes(b"a b c d\n")
    with pytest.raises(DataError, match="line 1"):
        read_graph(str(path))


def test_other_libraries(tmp_path):
    wanted = np.zeros((5, 5))
    for a, b, w in [(0, 1, 2.0), (1, 2, 1.0), (3, 0, 0.5)]:
        wanted[a, b] = wanted[b, a] = w
    sparse = scipy.sparse.csr_matrix(wanted)
    np.testing.assert_array_equal(matrix(graph_of(sparse)), wanted)
    np.testing.assert_array_equal(matrix(graph_of(scipy.sparse.triu(sparse))), wanted)
    scipy.sparse.save_npz(tmp_path / "a.npz", sparse)
    np.testing.assert_array_equal(matrix(read_graph(str(tmp_path / "a.npz"))), wanted)
    a, b = np.nonzero(np.triu(wanted))
    np.savez(tmp_path / "b.npz", edge_index=[a, b], edge_weight=wanted[a, b], num_nodes=5)
    np.testing.assert_array_equal(matrix(read_graph(str(tmp_path / "b.npz"))), wanted)
    other = networkx.Graph(
        [(x, y, {"weight": w}) for x, y, w in zip(a, b, wanted[a, b], strict=True)]
    )
    other.add_node(4)
    graph = graph_of(networkx.relabel_nodes(other, int))
    order = graph.ids
    np.testing.assert_array_equal(matrix(graph), wanted[np.ix_(order, order)])
    assert graph_of(networkx.path_graph(["x", "y"])).ids.tolist() == ["x", "y"]
    torch = pytest.importorskip("torch")
    data = SimpleNamespace(
        edge_index=torch.tensor(np.array([a, b])), edge_weight=torch.tensor(wanted[a, b]),
        num_nodes=5, y=torch.tensor([1, 0, 1, -1, 0]),
    )  # fmt: skip
    graph = graph_of(data)
    np.testing.assert_array_equal(matrix(graph), wanted)
    assert graph.labels.names == ("0", "1") and graph.labels.labelled.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CSRGraph.from_edges([0], [1, 2]), "1 sources for 2"),
        (lambda: CSRGraph.from_edges([0.5], [1]), "whole numbers"),
        (lambda: CSRGraph.from_edges([[0]], [1]), "whole numbers"),
        (lambda: CSRGraph.from_edges([-1], [1]), "id -1"),
        (lambda: CSRGraph.from_edges([0], [3], num_nodes=3), "target = 3"),
        (lambda: CSRGraph.from_edges([0], [1], [np.nan]), r"weight\[0\] = nan"),
        (lambda: CSRGraph.from_edges([0], [1], [1, 2]), "weight"),
        (lambda: CSRGraph.from_edges([0], [1], ["x"]), "weight"),
        (lambda: CSRGraph.from_edges([0], [1], num_nodes=2, ids=np.arange(3)), "ids"),
        (lambda: CSRGraph.from_edges([2**63], np.array([0], np.uint64)), "2\\^63"),
        (lambda: graph_of(scipy.sparse.csr_matrix((2, 3))), "square"),
        (lambda: graph_of({"a": 1}), "dict"),
        (lambda: graph_of(SimpleNamespace(edge_index=np.zeros((3, 4), int))), "edge_index"),
        (lambda: package_graph("color"), "section or tags"),
    ],
)
def test_refuses(make, said):
    with pytest.raises(GraphError, match=said):
        make()


def test_saved_graphs_are_mapped(tmp_path):
    labels = NodeLabels.of([["x"], [], ["y", "x"], []])
    graph = CSRGraph.from_edges(
        [0, 1], [1, 2], [1.5, 2], ids=np.array(["a", "b", "c", "d"]), labels=labels
    )
    graph.save(tmp_path / "g")
    again = read_graph(str(tmp_path / "g"))
    assert isinstance(again.indices, np.memmap) and again.labels.names == ("x", "y")
    np.testing.assert_array_equal(matrix(again), matrix(graph))
    assert again.ids.tolist() == ["a", "b", "c", "d"] and again.counts == graph.counts
    np.testing.assert_array_equal(again.labels.dense(), labels.dense())
    with pytest.raises(DataError, match="exists already"):
        graph.save(tmp_path / "g")
    np.save(tmp_path / "g" / "indices.npy", np.array([1, 0, 9, 1], np.int32))
    with pytest.raises(DataError, match="indices outside"):
        CSRGraph.open(tmp_path / "g")
    np.save(tmp_path / "g" / "indices.npy", np.array([None], object), allow_pickle=True)
    with pytest.raises(DataError, match="not a graph"):
        CSRGraph.open(tmp_path / "g")
    (tmp_path / "g" / "graph.json").unlink()
    with pytest.raises(DataError, match="not a graph"):
        CSRGraph.open(tmp_path / "g")


def test_npz_that_is_no_graph(tmp_path):
    path = tmp_path / "a.npz"
    for content in (b"", b"PK\x03\x04 and then nothing"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            read_graph(str(path))
    np.savez(path, something=np.zeros(3))
    with pytest.raises(DataError, match="edge_index"):
        read_graph(str(path))
    np.savez(path, edge_index=np.array([None, None], object))
    with pytest.raises(DataError, match="cannot be read"):
        read_graph(str(path))


def test_packages(tmp_path):
    place = tmp_path / "var/lib/apt/lists"
    place.mkdir(parents=True)
    (place / "x_Packages").write_text(
        "Package: a\nSection: libs\nDepends: b | c, missing\nTag: role::x, use::y\n\n"
        "Package: b\nSection: net\nSuggests: a\n\nPackage: c\nSection: libs\n\nPackage: d\n\n"
    )
    graph = package_graph(root=tmp_path)
    assert graph.ids.tolist() == ["a", "b", "c", "d"] and graph.counts["duplicate_edges"] == 1
    assert matrix(graph)[0].tolist() == [0, 1, 1, 0]
    assert graph.labels.names == ("libs", "net") and graph.labels.single
    tags = package_graph("tags", root=tmp_path)
    assert tags.labels.names == ("role::x", "use::y") and not tags.labels.single
    assert tags.labels.labelled.tolist() == [0]


def test_planted_communities():
    graph = read_graph("planted:1000")
    assert graph.num_nodes == 1000 and len(graph.labels.names) == 10 and graph.labels.single
    rows, columns = graph.edges()
    inside = (graph.labels.indices[rows] == graph.labels.indices[columns]).mean()
    assert 0.75 < inside < 0.9 and 8 < graph.nnz / 1000 < 10
    assert read_graph("planted:2").num_nodes == 2
    for wrong in ("planted:", "planted:1", "planted:-5", "planted:x", "planted:9999999999"):
        with pytest.raises(GraphError, match="data = 'planted:"):
            read_graph(wrong)


def test_labels(tmp_path):
    graph = CSRGraph.from_edges([5, 9], [9, 2**40])
    path = tmp_path / "labels.txt"
    path.write_text(f"# id label\n5 a b\n{2**40},c\n{2**40},a b\n777 z\n")
    labels = read_labels(path, graph)
    assert labels.names == ("a b", "c")
    assert labels.dense().tolist() == [[True, False], [False, False], [True, True]]
    path.write_text("5 a\n9\n")
    with pytest.raises(DataError, match="line 2"):
        read_labels(path, graph)
    path.write_text("777 z\n")
    with pytest.raises(DataError, match="no node"):
        read_labels(path, graph)
    with pytest.raises(DataError, match="cannot be read"):
        read_labels(Path(tmp_path / "none"), graph)
    with pytest.raises(GraphError, match="of 1 nodes"):
        graph.with_labels(NodeLabels.of([["a"]]))
