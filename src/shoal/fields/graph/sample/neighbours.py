"""Neighbours of some nodes, layer by layer, without replacement.

Source: Hamilton et al., Inductive Representation Learning on Large Graphs (GraphSAGE), 2017.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import c_int, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import require
from shoal.core.native import build
from shoal.core.random import Permutation, seed64
from shoal.fields.graph.graph import CSRGraph, GraphError

ALL = -1
"""A fan-out: all neighbours."""


@functools.cache
def _native() -> ctypes.CDLL:
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    library = build(source, name="neighbours")
    p, n = c_void_p, c_int64
    library.sample_layer.argtypes = [p, p, c_int, p, n, p, c_uint64, p, p]
    library.sample_layer.restype = n
    return library


@dataclass(frozen=True)
class NodeBlock:
    """One layer: which nodes pool which.

    Args:
        ptr: int64 [T + 1]; the first T of the nodes that come in pool neighbours, and go out.
        neighbours: int64, places among the nodes that come in.
        num_nodes: that come in.
    """

    ptr: np.ndarray
    neighbours: np.ndarray
    num_nodes: int


@dataclass(frozen=True)
class SampledNodes:
    """What a batch computes with.

    Args:
        nodes: int64, of the graph, each once; the first are the seeds.
        num_seeds: how many these are.
        blocks: the layer next to the features first.
    """

    nodes: np.ndarray
    num_seeds: int
    blocks: tuple[NodeBlock, ...]

    @property
    def seeds(self) -> np.ndarray:
        """Nodes whose vectors come out, int64."""
        return self.nodes[: self.num_seeds]


class NeighbourSampler:
    """Draws neighbours; what it draws depends on seed, epoch, batch and node only.

    Args:
        graph: of which neighbours are drawn.
        fanouts: neighbours of a node at most, those of the seeds first; -1 for all.
        seed: of what is drawn.

    Raises:
        GraphError: no fan-outs, or one that is neither -1 nor at least 1.
    """

    def __init__(self, graph: CSRGraph, fanouts: Sequence[int], seed: int = 0) -> None:
        check_fanouts(fanouts)
        require(
            graph.num_nodes < 2**31, "graph num_nodes", graph.num_nodes,
            expected="fewer than 2^31 nodes", error=GraphError,
        )  # fmt: skip
        self.graph, self.fanouts, self.seed = graph, tuple(fanouts), seed
        self._indptr = np.ascontiguousarray(graph.indptr, np.int64)
        self._indices = np.ascontiguousarray(graph.indices)
        self._number = np.full(graph.num_nodes, -1, np.int32)

    def sample(self, seeds: np.ndarray, *, epoch: int = 0, batch: int = 0) -> SampledNodes:
        """The blocks of a batch; not for several threads at once.

        Args:
            seeds: int64, nodes, each once.
            epoch: of which training.
            batch: of that epoch.

        Raises:
            GraphError: a node that does not exist, or twice.
        """
        seeds = np.ascontiguousarray(seeds, np.int64)
        known = self.graph.num_nodes
        if len(seeds) and (seeds.min() < 0 or seeds.max() >= known):
            wrong = int(seeds.min()) if seeds.min() < 0 else int(seeds.max())
            raise GraphError(f"seeds: node {wrong}; expected 0 to {known - 1}")
        number, nodes, blocks = self._number, seeds, []
        number[seeds] = np.arange(len(seeds))
        try:
            if (number[seeds] != np.arange(len(seeds))).any():
                raise GraphError("seeds: a node twice; expected each once")
            for at, fanout in enumerate(self.fanouts):
                key = seed64(
                    self.seed, purpose="neighbours of a batch", step=epoch, layer=at, index=batch
                )
                block, nodes = self._layer(nodes, fanout, key)
                blocks.append(block)
        finally:
            number[nodes] = -1
        return SampledNodes(nodes, len(seeds), tuple(reversed(blocks)))

    def _layer(self, nodes: np.ndarray, fanout: int, key: int) -> tuple[NodeBlock, np.ndarray]:
        degrees = self._indptr[nodes + 1] - self._indptr[nodes]
        taken = degrees if fanout == ALL else np.minimum(degrees, fanout)
        ptr = np.concatenate([[0], np.cumsum(taken)])
        room = np.empty(min(len(nodes) + int(ptr[-1]), self.graph.num_nodes), np.int64)
        room[: len(nodes)] = nodes
        neighbours = np.empty(int(ptr[-1]), np.int64)
        count = _native().sample_layer(
            self._indptr.ctypes.data, self._indices.ctypes.data, self._indices.dtype.itemsize == 8,
            room.ctypes.data, len(nodes), ptr.ctypes.data, key, self._number.ctypes.data,
            neighbours.ctypes.data,
        )  # fmt: skip
        return NodeBlock(ptr, neighbours, count), room[:count]


def check_fanouts(fanouts: Sequence[int], where: str = "fanouts") -> None:
    """Refuse fan-outs that draw nothing.

    Raises:
        GraphError: names the value.
    """
    require(len(fanouts) > 0, where, list(fanouts), expected="one for each layer", error=GraphError)
    for one in fanouts:
        require(
            one == ALL or one >= 1, where, one, expected="at least 1, or -1 for all neighbours",
            error=GraphError,
        )  # fmt: skip


def most_nodes(graph: CSRGraph, fanouts: Sequence[int], batch_size: int) -> int:
    """Nodes that a batch can have at most."""
    most = batch_size
    for one in fanouts:
        most = graph.num_nodes if one == ALL else min(most * (1 + one), graph.num_nodes)
    return min(most, graph.num_nodes)


def epoch_samples(
    sampler: NeighbourSampler, nodes: np.ndarray, batch_size: int, number: int
) -> Iterator[SampledNodes]:
    """The batches of an epoch, drawn.

    Args:
        sampler: draws their neighbours.
        nodes: int64, each once in an epoch.
        batch_size: nodes of a batch.
        number: of the epoch.
    """
    order = Permutation(len(nodes), sampler.seed, number)(np.arange(len(nodes)))
    for batch, begin in enumerate(range(0, len(nodes), batch_size)):
        seeds = nodes[order[begin : begin + batch_size]]
        yield sampler.sample(seeds, epoch=number, batch=batch)
