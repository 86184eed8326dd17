"""The graph of a job ``train_deep_gnn``, read and divided once in a process."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from shoal.core.files import open_atomic
from shoal.fields.graph.deep.job import TrainDeepGnnJob
from shoal.fields.graph.deep.partition import NodeDivision, normalised
from shoal.fields.graph.deep.protocols import DeepGnnError, RankGrid
from shoal.fields.graph.gnn.inputs import ClassifiedGraph, classified_graph
from shoal.fields.graph.gnn.job import ClassifiedGraphKeys


def deep_graph(job: TrainDeepGnnJob) -> ClassifiedGraph:
    """The graph with its classes, whose edges go both ways.

    Raises:
        DataError: a file cannot be read.
        DeepGnnError: its edges have directions.
        GnnError: it has weights, or no single labels.
    """
    keys = {name: getattr(job, name) for name in ClassifiedGraphKeys.model_fields}
    return _read(ClassifiedGraphKeys(**keys))


@functools.lru_cache(maxsize=1)
def _read(job: ClassifiedGraphKeys) -> ClassifiedGraph:
    data = classified_graph(job)
    if data.graph.directed:
        raise DeepGnnError(
            f"data = {job.data}: edges have directions; expected an undirected graph"
        )
    return data


def write_inputs(
    path: Path, data: ClassifiedGraph, features: np.ndarray, division: NodeDivision
) -> None:
    """What ranks read.

    Args:
        path: of the .npz.
        data: the graph with its classes.
        features: float32 [N, F].
        division: of its nodes.
    """
    matrix = normalised(data.graph)
    with open_atomic(path) as file:
        np.savez(
            file, values=matrix.data, indices=matrix.indices, indptr=matrix.indptr,
            x=features.astype(np.float32), classes=data.classes, num_classes=data.num_classes,
            train=data.train, val=data.val, part=division.part, chunk=division.chunk,
        )  # fmt: skip


def divide(data: ClassifiedGraph, grid: RankGrid, layers: int) -> NodeDivision:
    """The nodes of each part and chunk.

    Raises:
        DeepGnnError: there are fewer layers than stages, or too few nodes.
    """
    if layers < grid.stages:
        raise DeepGnnError(
            f"layers = {layers}: {grid.stages} stages; expected a layer for each, or fewer ranks"
        )
    return NodeDivision.of(data.graph, grid)
