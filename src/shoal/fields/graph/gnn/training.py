"""Training a network on a graph, with early stopping by the nodes that validate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.parts import Choice
from shoal.core.random import seed64
from shoal.fields.graph.gather.table import FeatureTable
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.graph.gnn.network import GraphSAGE
from shoal.fields.graph.gnn.protocols import GnnError
from shoal.fields.graph.gnn.segments import sampled
from shoal.fields.graph.sample.loader import NeighborLoader


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
        losses: of each step.
    """

    network: GraphSAGE
    epoch: int
    val: float
    test: float
    predicted: np.ndarray
    seconds: list[float]
    losses: list[float]


def train_network(
    job: TrainGnnJob,
    choice: Choice,
    data: ClassifiedGraph,
    features: np.ndarray,
    seed: int,
    watch: Callable[[int], None] = lambda epoch: None,
    *,
    table: FeatureTable | None = None,
    overlap: bool = True,
) -> TrainedGnn:
    """Train one network; the test nodes are looked at once, with the parameters of the best epoch.

    Args:
        job: what is trained.
        choice: the aggregator.
        data: the graph with its classes.
        features: float32 [N, F].
        seed: of parameters, dropout, orders and neighbours.
        watch: called with the number of each epoch.
        table: what batches gather features from, where the job has fan-outs.
        overlap: batches are drawn and gathered while others are trained on.

    Raises:
        GnnError: the loss is no longer finite.
    """
    x = torch.from_numpy(np.ascontiguousarray(features))
    ptr = torch.from_numpy(data.graph.indptr.copy())
    neighbours = torch.from_numpy(data.graph.indices.astype(np.int64))
    classes = torch.from_numpy(data.classes)
    train, val, test = (torch.from_numpy(one) for one in (data.train, data.val, data.test))
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed64(seed, purpose="graph network"))
        network = network_of(job, choice, x.shape[1], data.num_classes)
        optimizer = optimizer_of(job, network)
        if table is None:
            draw = torch.Generator().manual_seed(seed64(seed, purpose="neighbours"))
        else:
            loader = NeighborLoader(
                data.graph, job.fanouts, table, nodes=data.train, batch_size=job.batch_size,
                seed=seed, overlap=overlap,
            )  # fmt: skip

        def steps(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
            """Scores and classes of the nodes that each step of an epoch learns of."""
            if table is not None:
                for batch in loader.epoch(epoch):
                    yield network.on_blocks(batch.x, batch.blocks), classes[batch.seeds]
                return
            rows, some = ptr, neighbours
            if job.neighbours:
                places, rows = sampled(ptr, job.neighbours, draw)
                some = neighbours[places]
            yield network(x, rows, some)[train], classes[train]

        best, best_epoch, seconds = -1.0, 0, []
        kept: dict[str, Tensor] = {}
        for epoch in range(1, job.epochs + 1):
            begin = time.perf_counter()
            network.train()
            for scores, wanted in steps(epoch):
                losses.append(step(network, optimizer, scores, wanted))
                if not math.isfinite(losses[-1]):
                    raise GnnError(
                        f"learning_rate = {job.learning_rate}: the loss of epoch {epoch} is "
                        f"{losses[-1]:g}; expected a lower rate"
                    )
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
        losses=losses,
    )


def network_of(job: TrainGnnJob, choice: Choice, features: int, classes: int) -> GraphSAGE:
    """A network with fresh parameters."""
    return GraphSAGE(
        features, job.hidden, classes, layers=job.layers, aggregator=choice, dropout=job.dropout
    )


def optimizer_of(job: TrainGnnJob, network: GraphSAGE) -> torch.optim.Optimizer:
    """What updates it."""
    return torch.optim.Adam(
        network.parameters(), lr=job.learning_rate, weight_decay=job.weight_decay
    )


def step(
    network: GraphSAGE, optimizer: torch.optim.Optimizer, scores: Tensor, classes: Tensor
) -> float:
    """One update, unless the loss is not finite; the loss."""
    loss = torch.nn.functional.cross_entropy(scores, classes) + network.penalty()
    value = float(loss.detach())
    if math.isfinite(value):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return value


def _assigned(network: GraphSAGE, x: Tensor, ptr: Tensor, neighbours: Tensor) -> Tensor:
    network.eval()
    with torch.no_grad():
        scores: Tensor = network(x, ptr, neighbours)
    return scores.argmax(1)


def _accuracy(assigned: Tensor, classes: Tensor, nodes: Tensor) -> float:
    return float((assigned[nodes] == classes[nodes]).double().mean())
