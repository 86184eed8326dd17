"""Training a network on a graph, with early stopping by the nodes that validate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.parts import Choice
from shoal.core.random import seed64
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.graph.gnn.network import GraphSAGE
from shoal.fields.graph.gnn.protocols import GnnError
from shoal.fields.graph.gnn.segments import sampled


@dataclass(frozen=True)
class TrainedGnn:
    """A network of the epoch that validated best.

    Args:
        network: in evaluation mode.
        epoch: which one it was, from 1.
        val: share of the nodes that validate which it assigns rightly.
        test: of the nodes that test.
        predicted: int64 [N], the class of each node.
        seconds: of each epoch, without validation.
    """

    network: GraphSAGE
    epoch: int
    val: float
    test: float
    predicted: np.ndarray
    seconds: list[float]


def train_network(
    job: TrainGnnJob,
    choice: Choice,
    data: ClassifiedGraph,
    features: np.ndarray,
    seed: int,
    watch: Callable[[int], None] = lambda epoch: None,
) -> TrainedGnn:
    """Train one network; the test nodes are looked at once, with the parameters of the best epoch.

    Args:
        job: what is trained.
        choice: the aggregator.
        data: the graph with its classes.
        features: float32 [N, F].
        seed: of parameters, dropout, orders and neighbours.
        watch: called with the number of each epoch.

    Raises:
        GnnError: the loss is no longer finite.
    """
    x = torch.from_numpy(np.ascontiguousarray(features))
    ptr = torch.from_numpy(data.graph.indptr.copy())
    neighbours = torch.from_numpy(data.graph.indices.astype(np.int64))
    classes = torch.from_numpy(data.classes)
    train, val, test = (torch.from_numpy(one) for one in (data.train, data.val, data.test))
    draw = torch.Generator().manual_seed(seed64(seed, purpose="neighbours"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(seed, purpose="graph network"))
        network = GraphSAGE(
            x.shape[1], job.hidden, data.num_classes, layers=job.layers, aggregator=choice,
            dropout=job.dropout,
        )  # fmt: skip
        optimizer = torch.optim.Adam(
            network.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay
        )
        best, best_epoch, seconds = -1.0, 0, []
        kept: dict[str, Tensor] = {}
        for epoch in range(1, job.epochs + 1):
            begin = time.perf_counter()
            network.train()
            rows, some = ptr, neighbours
            if job.neighbours:
                places, rows = sampled(ptr, job.neighbours, draw)
                some = neighbours[places]
            optimizer.zero_grad()
            scores = network(x, rows, some)
            loss = torch.nn.functional.cross_entropy(scores[train], classes[train])
            loss = loss + network.penalty()
            if not bool(torch.isfinite(loss)):
                raise GnnError(
                    f"learning_rate = {job.learning_rate}: the loss of epoch {epoch} is "
                    f"{loss.item():g}; expected a lower rate"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            right = _accuracy(_assigned(network, x, ptr, neighbours), classes, val)
            if right > best:
                best, best_epoch = right, epoch
                kept = {name: one.clone() for name, one in network.state_dict().items()}
            watch(epoch)
        network.load_state_dict(kept)
    found = _assigned(network, x, ptr, neighbours)
    return TrainedGnn(
        network=network,
        epoch=best_epoch,
        val=best,
        test=_accuracy(found, classes, test),
        predicted=found.numpy(),
        seconds=seconds,
    )


def _assigned(network: GraphSAGE, x: Tensor, ptr: Tensor, neighbours: Tensor) -> Tensor:
    network.eval()
    with torch.no_grad():
        scores: Tensor = network(x, ptr, neighbours)
    return scores.argmax(1)


def _accuracy(assigned: Tensor, classes: Tensor, nodes: Tensor) -> float:
    return float((assigned[nodes] == classes[nodes]).double().mean())
