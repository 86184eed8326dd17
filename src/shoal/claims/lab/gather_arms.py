"""Arms of the claim about gathers: features of packages, and epochs over sampled batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.extras import import_extra
from shoal.core.parts import Choice
from shoal.core.random import seed64
from shoal.corpora.debian import debian_packages
from shoal.fields.graph import embed
from shoal.fields.graph.gather.native import gather_rows
from shoal.fields.graph.gather.protocols import FeaturePlacement, Fetch
from shoal.fields.graph.gather.staged import StagedFeatures
from shoal.fields.graph.gather.table import FeatureTable, placed
from shoal.fields.graph.gnn.batches import rehearsed
from shoal.fields.graph.gnn.feeding import table_of
from shoal.fields.graph.gnn.inputs import ClassifiedGraph, classified_graph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.graph.gnn.training import (
    TrainedGnn,
    network_of,
    optimizer_of,
    step,
    train_network,
)
from shoal.fields.graph.graph import CSRGraph
from shoal.fields.graph.sample.loader import NeighborLoader
from shoal.fields.graph.sample.neighbours import NeighbourSampler, SampledNodes, epoch_samples
from shoal.fields.retrieve.search.hashed import HashedWords
from shoal.memory.tiers.mover import Ticket

MEAN = Choice(name="mean")
WIDTH = 602
_FASTRP = 128


def requests_of_rows(width: int, *, aligned: bool) -> float:
    """Requests for all rows of a table that begins with a line, at every offset that rows have."""
    raw = np.zeros(1024 * width + 32, np.float32)
    begin = -raw.ctypes.data % 128 // 4
    table = raw[begin : begin + 1024 * width].reshape(1024, width)
    return float(gather_rows(table, np.arange(1024), table.copy(), aligned=aligned).requests)


def graph_with_features(job: TrainGnnJob) -> ClassifiedGraph:
    """The graph of the job, its features those of packages; of any other graph drawn ones."""
    data = classified_graph(job)
    if job.data == "packages":
        return replace(data, features=package_features(data.graph, WIDTH, job.seed))
    shape = (data.graph.num_nodes, WIDTH)
    drawn = np.random.default_rng(job.seed).standard_normal(shape, np.float32)
    return replace(data, features=drawn)


def learned(job: TrainGnnJob, data: ClassifiedGraph, placement: str) -> tuple[TrainedGnn, int]:
    """A training on batches, and the bytes that the memory of the features moved."""
    assert data.features is not None
    with table_of(job, Choice(name=placement), data, data.features, job.seed) as table:
        found = train_network(job, MEAN, data, data.features, job.seed, table=table)
        table.close()
        return found, table.counters().host_bytes


def package_features(graph: CSRGraph, width: int, seed: int) -> np.ndarray:
    """FastRP's vectors beside hashed words of names and descriptions, float32 [N, width].

    Args:
        graph: of the packages.
        width: numbers of a row, more than 136.
        seed: of FastRP.
    """
    vectors = embed(graph, "fastrp", dim=_FASTRP, weights=(1, 1, 1, 1), beta=0.0, seed=seed).vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = debian_packages().rows
    texts = [f"package {one.name} {one.description}" for one in rows]
    words = HashedWords(dim=width - _FASTRP).embed(texts)
    return np.hstack([vectors / np.maximum(lengths, 1e-12), words]).astype(np.float32)


def first_epoch(job: TrainGnnJob, data: ClassifiedGraph) -> list[SampledNodes]:
    """The batches of the first epoch."""
    sampler = NeighbourSampler(data.graph, job.fanouts, job.seed)
    return list(epoch_samples(sampler, data.train, job.batch_size, 1))


def matched_rate(job: TrainGnnJob, data: ClassifiedGraph) -> float:
    """Bytes a second at which the rows of a batch, moved once, take as long as training on it."""
    assert data.features is not None
    samples = first_epoch(job, data)
    rows = float(np.mean([len(one.nodes) for one in samples]))
    return float(4 * data.features.shape[1] * rows / rehearsed(job, MEAN, data, samples))


def epoch_arm(
    job: TrainGnnJob, placement: str | FeaturePlacement, data: ClassifiedGraph
) -> tuple[Callable[[], object], FeatureTable]:
    """What trains on the next epoch, with overlap, and the table that it gathers from."""
    assert data.features is not None
    table = table_of(job, placed(placement), data, data.features, job.seed)
    loader = NeighborLoader(
        data.graph, job.fanouts, table, nodes=data.train, batch_size=job.batch_size, seed=job.seed
    )
    classes = torch.from_numpy(data.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(job.seed, purpose="graph network"))
        network = network_of(job, MEAN, data.features.shape[1], data.num_classes)
    optimizer = optimizer_of(job, network)

    def epoch() -> None:
        network.train()
        for batch in loader:
            scores = network.on_blocks(batch.x, batch.blocks)
            step(network, optimizer, scores, classes[batch.seeds])

    return epoch, table


def gpu_gathers(
    stack: contextlib.ExitStack, table_bytes: float, rows: int
) -> dict[str, Callable[[], object]]:
    """Gathers of random rows to a GPU from a page-locked table, staged and direct.

    Args:
        stack: closes the tables.
        table_bytes: of the table.
        rows: of a gather.
    """
    values = torch.empty(int(table_bytes / 4 / WIDTH), WIDTH, pin_memory=True).fill_(1.0)
    at = torch.randint(len(values), (rows,))
    arms: dict[str, Callable[[], object]] = {}
    for name in ("direct", "staged"):
        table = stack.enter_context(FeatureTable(values, name, batch_rows=rows, device="cuda"))
        arms[f"gpu {name}"] = partial(_gathered, table, at)
    return arms


def _gathered(table: FeatureTable, rows: Tensor) -> Tensor:
    return table.gather(rows, out=table.buffers[0]).wait()


class GeometricStaged(StagedFeatures):
    """Rows selected as the loader of torch-geometric does, then copied, on the same threads."""

    def place(self, table: FeatureTable) -> Fetch:
        """Memory is allocated anew each time, as there."""
        utils: Any = import_extra("torch_geometric.loader.utils", extra="graph", purpose="the peer")

        def fetch(rows: Tensor, out: Tensor) -> Ticket:
            packed: list[Tensor] = []
            packing = table.packing.submit(
                lambda: packed.append(utils.index_select(table.values, rows)), 2 * out.nbytes
            )

            def copy() -> None:
                out.copy_(packed.pop())

            return table.moving.submit(copy, out.nbytes, after=packing)

        return fetch
