"""Batches of nodes with the features of all that they pool, gathered while others are trained on.

Source: Min et al., Large Graph Convolutional Network Training with GPU-Oriented Data Communication
Architecture, 2021.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import require
from shoal.fields.graph.gather.table import BUFFERS, FeatureTable, PendingRows
from shoal.fields.graph.graph import CSRGraph, GraphError
from shoal.fields.graph.sample.neighbours import NeighbourSampler, SampledNodes, epoch_samples


@dataclass(frozen=True)
class NeighborBatch:
    """A batch on the device.

    Args:
        seeds: int64 [B] on the host, nodes whose vectors come out.
        nodes: int64 [n] on the host, nodes whose features come in; the first are the seeds.
        x: float32 [n, F]; overwritten once the next batch but one is asked for.
        blocks: pointers and neighbours of each layer, the one next to the features first; as
            :meth:`GraphSAGE.on_blocks` takes them.
    """

    seeds: Tensor
    nodes: Tensor
    x: Tensor
    blocks: tuple[tuple[Tensor, Tensor], ...]


class NeighborLoader:
    """Batches of nodes, each node once in an epoch, in an order that the seed decides.

    While batch ``i`` is trained on, the features of ``i + 1`` are gathered and the neighbours of
    ``i + 2`` drawn, on threads of their own.

    Args:
        graph: whose nodes are trained on.
        fanouts: neighbours of a node at most, those of the batch's nodes first; -1 for all.
        features: rows of all nodes of the graph.
        nodes: int64, what is trained on; None for all.
        batch_size: nodes of a batch.
        seed: of orders and neighbours.
        overlap: work ahead; without, each batch is drawn and gathered when it is asked for.

    Raises:
        GraphError: fan-outs or nodes that cannot be, or features of other nodes.
    """

    def __init__(
        self,
        graph: CSRGraph,
        fanouts: Sequence[int] = (10, 10),
        features: FeatureTable | None = None,
        *,
        nodes: Any = None,
        batch_size: int = 512,
        seed: int = 0,
        overlap: bool = True,
    ) -> None:
        require(batch_size >= 1, "batch_size", batch_size, expected="at least 1", error=GraphError)
        self.sampler = NeighbourSampler(graph, fanouts, seed)
        if features is None or features.num_rows != graph.num_nodes:
            rows = "none" if features is None else f"{features.num_rows} rows"
            raise GraphError(f"features: {rows}; expected a table of {graph.num_nodes} rows")
        every = np.arange(graph.num_nodes) if nodes is None else np.asarray(nodes, np.int64)
        require(len(every) > 0, "nodes", len(every), expected="at least one", error=GraphError)
        self.features, self.batch_size, self.overlap = features, batch_size, overlap
        self.nodes, self._next, self._used = every, 0, threading.Lock()

    def __len__(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.nodes) // self.batch_size)

    def __iter__(self) -> Iterator[NeighborBatch]:
        """The next epoch, from 0."""
        self._next += 1
        return self.epoch(self._next - 1)

    def sampled(self, number: int) -> Iterator[SampledNodes]:
        """The nodes of each batch of an epoch."""
        return epoch_samples(self.sampler, self.nodes, self.batch_size, number)

    def epoch(self, number: int) -> Iterator[NeighborBatch]:
        """The batches of an epoch; the same whenever it is asked for.

        Raises:
            GraphError: another epoch is under way.
            ShoalError: a batch cannot be drawn or gathered.
        """
        if not self._used.acquire(blocking=False):
            raise GraphError("epoch: another one is under way; end it first, they share buffers")
        try:
            yield from self._ahead(number) if self.overlap else self._in_turn(number)
        finally:
            self._used.release()

    def _in_turn(self, number: int) -> Iterator[NeighborBatch]:
        for sampled in self.sampled(number):
            yield self._batch(sampled, self._gather(sampled, 0))

    def _ahead(self, number: int) -> Iterator[NeighborBatch]:
        # Places of two batches: one that is trained on, one whose rows are under way.
        free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for place in range(BUFFERS):
            free.put(place)

        def work() -> None:
            try:
                for sampled in self.sampled(number):
                    place = free.get()
                    if place is None:
                        return
                    ready.put((sampled, self._gather(sampled, place), place))
                ready.put(None)
            except BaseException as cause:  # raised where batches are asked for
                ready.put(cause)

        thread = threading.Thread(target=work, name="neighbours", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                sampled, pending, place = item
                yield self._batch(sampled, pending)
                free.put(place)
        finally:
            free.put(None)
            thread.join()

    def _gather(self, sampled: SampledNodes, place: int) -> PendingRows:
        buffers, rows = self.features.buffers, len(sampled.nodes)
        out = buffers[place][:rows] if buffers and rows <= len(buffers[place]) else None
        return self.features.gather(sampled.nodes, out=out)

    def _batch(self, sampled: SampledNodes, pending: PendingRows) -> NeighborBatch:
        device = self.features.device
        blocks = tuple(
            (torch.from_numpy(one.ptr).to(device), torch.from_numpy(one.neighbours).to(device))
            for one in sampled.blocks
        )
        nodes = torch.from_numpy(sampled.nodes)
        return NeighborBatch(nodes[: sampled.num_seeds], nodes, pending.wait(), blocks)
