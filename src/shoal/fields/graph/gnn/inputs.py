"""The graph of a job ``train_gnn``: features, classes, and which nodes are for what."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError, require
from shoal.core.files import expanded
from shoal.core.random import generator
from shoal.cost.workloads.trace import find_data
from shoal.fields.graph.embedding.call import embed
from shoal.fields.graph.gather.table import mapped_table
from shoal.fields.graph.gnn.job import ClassifiedGraphKeys, TrainGnnJob
from shoal.fields.graph.gnn.protocols import GnnError
from shoal.fields.graph.graph import CSRGraph
from shoal.fields.graph.loading import read_graph, read_labels
from shoal.fields.graph.sample.neighbours import check_fanouts

_SOURCE = "kimiyoung/planetoid, converted"
# Rows of features that are checked at a time.
_CHECKED = 2**16
_ARRAYS = ("x_data", "x_indices", "x_indptr", "x_shape", "labels", "edges", "train", "val", "test")


@dataclass(frozen=True)
class ClassifiedGraph:
    """A graph whose nodes have classes.

    Args:
        graph: N nodes.
        features: float32 [N, F]; None where the graph has none.
        classes: int64 [N]; -1 for none.
        num_classes: how many there are.
        train: int64, the nodes that the network learns of.
        val: by which the best epoch is chosen.
        test: by which it is judged.
    """

    graph: CSRGraph
    features: np.ndarray | None
    classes: np.ndarray
    num_classes: int
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray

    def features_of(self, dim: int, seed: int) -> np.ndarray:
        """The features, or vectors of FastRP where there are none, float32 [N, F].

        Args:
            dim: numbers of a vector of FastRP.
            seed: of FastRP.
        """
        if self.features is not None:
            return self.features
        vectors = embed(self.graph, "fastrp", dim=dim, weights=(1, 1, 1, 1), beta=0.0, seed=seed)
        rows = vectors.vectors
        return np.asarray((rows - rows.mean(axis=0)) / np.maximum(rows.std(axis=0), 1e-12))


def classified_graph(job: ClassifiedGraphKeys) -> ClassifiedGraph:
    """Read the graph and divide its nodes.

    Raises:
        DataError: a file cannot be read.
        GraphError: it is no graph.
        GnnError: it has weights, or no single labels; or keys of the job that do not fit.
    """
    data = _divided(job)
    if not job.features:
        return data
    path = expanded(job.features)
    values = mapped_table(path)
    if len(values) != data.graph.num_nodes:
        raise DataError(f"{path}: {len(values)} rows; the graph has {data.graph.num_nodes} nodes")
    for begin in range(0, len(values), _CHECKED):
        if not np.isfinite(values[begin : begin + _CHECKED]).all():
            raise DataError(f"{path}: numbers that are not finite, from row {begin} on")
    return replace(data, features=values)


def check_batches(job: TrainGnnJob) -> None:
    """Refuse keys of batches that do not go together.

    Raises:
        GraphError: fan-outs that draw nothing.
        GnnError: others.
    """
    if not job.fanouts:
        for name in ("placement", "host_bytes_per_s"):
            value = getattr(job, name)
            require(
                value is None, name, value, error=GnnError,
                expected="none without fanouts: steps over the whole graph gather nothing",
            )  # fmt: skip
        return
    check_fanouts(job.fanouts)
    require(
        len(job.fanouts) == job.layers, "fanouts", list(job.fanouts),
        expected=f"one for each of {job.layers} layers", error=GnnError,
    )  # fmt: skip
    require(
        not job.neighbours, "neighbours", job.neighbours,
        expected="0 beside fanouts, which say how many are drawn", error=GnnError,
    )  # fmt: skip


def _divided(job: ClassifiedGraphKeys) -> ClassifiedGraph:
    if job.data.endswith(".npz"):
        path = find_data("data", job.data, _SOURCE)
        given = _planetoid(path)
        if given is not None:
            require(
                not job.labels, "labels", job.labels,
                expected="none: the file has labels", error=GnnError,
            )  # fmt: skip
            return given
    graph = read_graph(job.data)
    if job.labels:
        graph = graph.with_labels(read_labels(expanded(job.labels), graph))
    if graph.weight is not None:
        raise GnnError(f"data = {job.data}: the graph has weights; expected edges without")
    labels = graph.labels
    if labels is None or len(labels.labelled) < 10:
        raise GnnError(f"data = {job.data}: expected a graph with labels of at least 10 nodes")
    if not labels.single:
        raise GnnError(f"data = {job.data}: nodes with several labels; expected one for each")
    require(
        job.train_share + job.val_share < 1, "val_share", job.val_share,
        expected=f"less than {1 - job.train_share:g}, so that nodes are left to test",
        error=GnnError,
    )  # fmt: skip
    classes = np.full(graph.num_nodes, -1)
    classes[labels.labelled] = labels.indices
    order = generator(job.seed, purpose="nodes of a network").permutation(labels.labelled)
    train = max(1, round(job.train_share * len(order)))
    val = train + max(1, round(job.val_share * len(order)))
    parts = (np.sort(one) for one in (order[:train], order[train:val], order[val:]))
    return ClassifiedGraph(graph, None, classes, len(labels.names), *parts)


def _planetoid(path: Path) -> ClassifiedGraph | None:
    """A file of features, labels, edges and a division; None if it is any other graph."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            if "x_data" not in file.files:
                return None
            arrays = {name: np.asarray(file[name]) for name in _ARRAYS}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    from scipy.sparse import csr_matrix

    try:
        rows, columns = map(int, arrays["x_shape"])
        entries: Any = (arrays["x_data"], arrays["x_indices"], arrays["x_indptr"])
        matrix: Any = csr_matrix(entries, (rows, columns))
        matrix.check_format()
        source, target = arrays["edges"].T
        graph = CSRGraph.from_edges(source, target, num_nodes=rows)
    except (TypeError, ValueError, IndexError) as cause:
        raise DataError(f"{path}: not a graph of Planetoid: {cause}") from cause
    nodes = len(classes := arrays["labels"].astype(np.int64))
    parts = [arrays[name].astype(np.int64) for name in ("train", "val", "test")]
    if nodes != rows or not all(len(part) for part in parts):
        raise DataError(f"{path}: {nodes} labels of {rows} nodes, or a division without nodes")
    if any(part.min() < 0 or part.max() >= nodes or classes[part].min() < 0 for part in parts):
        raise DataError(f"{path}: train, val or test has a node that does not exist, or no label")
    dense = np.asarray(matrix.toarray(), np.float32)
    if not np.isfinite(dense).all():
        raise DataError(f"{path}: features that are not finite")
    dense /= np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-12)
    return ClassifiedGraph(graph, dense, classes, int(classes.max()) + 1, *parts)
