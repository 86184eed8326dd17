"""What a rank does: its layers, for its nodes, chunk by chunk, there and back.

Forward, a chunk sees the vectors of this epoch in the chunks before it and those of the last epoch
in the others; backward, where chunks come in the other order, the same holds for gradients. Chunks
are in another order every epoch. Epochs that are exact have one chunk.

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from shoal.core.files import write_atomic
from shoal.core.parts import table
from shoal.core.random import generator, seed64
from shoal.fields.graph.deep.job import TrainDeepGnnJob
from shoal.fields.graph.deep.network import GCNII, StaleLayer, spread
from shoal.fields.graph.deep.partition import LocalRows, NodeDivision, RowChunk
from shoal.fields.graph.deep.protocols import DeepGnnError, RankGrid
from shoal.ir.comm import Comm, Pending
from shoal.machine.host import peak_memory

EPOCH = "epoch"
"""Name of the file with the number of epochs that are over."""


class DeepGnnRank:
    """One rank of a grid.

    Args:
        comm: all ranks.
        grid: how they share layers and nodes.
        network: with the parameters of all layers, equal on all ranks; its own are trained.
        rows: of its part.
        x: [n, features], of its own rows.
        classes: int64 [n]; -1 for none.
        learn: bool [n], the rows that it learns of.
        learned: rows that all ranks learn of.

    Attributes:
        layers: of its stage.
        scores: [n, classes], in the last stage.
    """

    def __init__(
        self,
        comm: Comm,
        grid: RankGrid,
        network: GCNII,
        rows: LocalRows,
        x: Tensor,
        classes: Tensor,
        learn: Tensor,
        learned: int,
    ) -> None:
        self._comm, self._grid, self._network, self._rows = comm, grid, network, rows
        self._x, self._classes, self._learn, self._learned = x, classes, learn, learned
        self._stage = comm.rank // grid.parts
        groups = np.arange(grid.world).reshape(grid.stages, grid.parts)
        self._peers = comm.split([list(map(int, one)) for one in groups])
        self._before, self._after = comm.rank - grid.parts, comm.rank + grid.parts
        self._first, self._last = self._stage == 0, self._stage == grid.stages - 1
        numbers = np.array_split(np.arange(len(network.weights)), grid.stages)[self._stage]
        self._own = [network.weights[int(one)] for one in numbers]
        # Every rank has the first and the last layer.
        self._shared = [*network.enter.parameters(), *network.leave.parameters()]
        self.parameters = [*self._shared, *self._own]
        for one in self.parameters:
            one.grad = torch.zeros_like(one)
        own, dtype = len(rows.own), x.dtype
        self.layers = [
            StaleLayer(int(number) + 1, weight, own, rows.total)
            for number, weight in zip(numbers, self._own, strict=True)
        ]
        hidden = network.enter.out_features
        self._h0, self._g0, self._out = (torch.zeros(own, hidden, dtype=dtype) for _ in range(3))
        self.scores = torch.zeros(own, network.leave.out_features, dtype=dtype)
        self._whole = rows.whole()
        # What is on its way; a tensor must not go before it has been sent.
        self._sending: list[tuple[Pending, Tensor]] = []

    @torch.no_grad()
    def epoch(self, number: int, seed: int, *, exact: bool) -> Tensor:
        """Gradients of one epoch, summed over the ranks that share a parameter.

        Args:
            number: of the epoch, which decides the order of the chunks.
            seed: of the orders.
            exact: all nodes are one chunk.

        Returns:
            The loss, of the last stage's own rows; 0 elsewhere.
        """
        for gradient in map(_grad, self.parameters):
            gradient.zero_()
        order = [self._whole]
        if not exact:
            draw = generator(seed, purpose="order of chunks", step=number)
            order = [self._rows.chunks[at] for at in draw.permutation(len(self._rows.chunks))]
        schedule = table("schedule").build("gpipe").build(self._grid.stages, len(order))
        loss = torch.zeros((), dtype=self._x.dtype)
        for op in schedule.ops[self._stage]:
            if op.kind == "F":
                self._forward(order[op.mb])
            else:
                loss += self._backward(order[op.mb])
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()
        for one in self._shared:
            self._comm.all_reduce(_grad(one), tag="gradients").wait()
        for one in self._own if self._grid.parts > 1 else ():
            self._peers.all_reduce(_grad(one), tag="gradients").wait()
        return loss

    def _send(self, x: Tensor, target: int, tag: str) -> None:
        self._sending.append((self._comm.send(x, target, tag=tag), x))

    def _forward(self, chunk: RowChunk) -> None:
        rows = chunk.rows
        # Every stage works out the first vectors for itself, so that they need not travel.
        h0 = self._h0[rows] = torch.relu(self._network.enter(self._x[rows]))
        self._g0[rows] = 0
        h = h0
        if not self._first:
            h = torch.empty_like(h0)
            self._comm.receive(h, self._before, tag="activations").wait()
        for layer in self.layers:
            layer.h[rows] = h
            self._exchange(chunk, layer.h)
            h = layer.forward(rows, chunk.matrix, h0)
        if self._last:
            self._out[rows] = h
            self.scores[rows] = self._network.leave(h)
        else:
            self._send(h, self._after, "activations")

    def _backward(self, chunk: RowChunk) -> Tensor:
        rows, loss = chunk.rows, torch.zeros((), dtype=self._x.dtype)
        if self._last:
            loss, grad = self._of_scores(rows)
        else:
            grad = torch.empty_like(self._h0[rows])
            self._comm.receive(grad, self._after, tag="gradients").wait()
        for layer in reversed(self.layers):
            self._g0[rows] += layer.backward(rows, grad)
            self._exchange(chunk, layer.g)
            grad = spread(chunk.matrix, layer.g)  # the matrix is symmetric
        if self._first:
            self._g0[rows] += grad
        else:
            self._send(grad, self._before, "gradients")
        change = self._g0[rows] * (self._h0[rows] > 0)
        _add_gradients(self._network.enter, change, self._x[rows])
        return loss

    def _of_scores(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The loss of some rows, and the gradient of what goes into the last linear layer."""
        some = self._learn[rows]
        with torch.enable_grad():
            scores = self.scores[rows].clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(
                scores[some], self._classes[rows][some], reduction="sum"
            )
            (change,) = torch.autograd.grad(loss / self._learned, scores)
        leave = self._network.leave
        _add_gradients(leave, change, self._out[rows])
        return loss.detach() / self._learned, change @ leave.weight

    def _exchange(self, chunk: RowChunk, x: Tensor) -> None:
        """Give the rows of a chunk to the peers that need them, and take theirs."""
        if self._grid.parts == 1:
            return
        for one in self._rows.chunks if chunk is self._whole else (chunk,):
            outs = [x[where] for where in one.take]
            xs = [x[torch.from_numpy(which)] for which in one.give]
            self._peers.all_to_all(outs, xs, tag="neighbours").wait()

    def right(self, which: Tensor) -> Tensor:
        """Rows that the last stage assigns rightly among some; 0 elsewhere."""
        if not self._last:
            return torch.zeros((), dtype=torch.int64)
        right: Tensor = (self.scores.argmax(1) == self._classes)[which]
        return right.sum()


def train_rank(
    comm: Comm, *, job: TrainDeepGnnJob, data: str, grid: RankGrid, seed: int, place: str
) -> Mapping[str, Any]:
    """Train on one rank; see :func:`shoal.parallel.comm.processes.run_processes`.

    Args:
        comm: all ranks.
        job: what is trained.
        data: a .npz with the matrix, the features, the classes and the division.
        grid: of the ranks.
        seed: of the parameters and the orders.
        place: a directory for the parameters of the epoch that validated best.

    Returns:
        Seconds, bytes sent, loss and whether it was exact by epoch; the best epoch; most bytes of
        memory.

    Raises:
        DeepGnnError: the loss is no longer finite.
    """
    with np.load(data, allow_pickle=False) as file:
        given = {name: np.asarray(file[name]) for name in file.files}
    n = len(given["classes"])
    matrix = csr_matrix((given["values"], given["indices"], given["indptr"]), (n, n))
    division = NodeDivision(given["part"], given["chunk"])
    rows = LocalRows.of(matrix, division, comm.rank % grid.parts, grid)

    def marked(name: str) -> Tensor:
        return torch.from_numpy(np.isin(rows.own, given[name]))

    torch.manual_seed(seed64(seed, purpose="deep graph network"))
    features = given["x"]
    network = GCNII(features.shape[1], job.hidden, int(given["num_classes"]), job.layers)
    rank = DeepGnnRank(
        comm, grid, network, rows, torch.from_numpy(features[rows.own]),
        torch.from_numpy(given["classes"][rows.own]), marked("train"), len(given["train"]),
    )  # fmt: skip
    val = marked("val")
    optimizer = torch.optim.Adam(
        rank.parameters, lr=job.learning_rate, weight_decay=job.weight_decay
    )
    best, best_epoch, kept = -1, 0, b""
    epochs: list[dict[str, Any]] = []
    for epoch in range(1, job.epochs + 1):
        exact = grid.chunks == 1 or job.exact(epoch)
        before = dict(comm.meter.totals())
        begin = time.perf_counter()
        loss = rank.epoch(epoch, seed, exact=exact)
        said = torch.tensor([float(loss), float(rank.right(val))], dtype=torch.float64)
        comm.all_reduce(said, tag="loss").wait()
        if not np.isfinite(said[0].item()):
            raise DeepGnnError(
                f"learning_rate = {job.learning_rate}: the loss of epoch {epoch} is "
                f"{said[0].item():g}; expected a lower rate"
            )
        if said[1] > best:  # of the parameters before the update
            best, best_epoch, kept = int(said[1]), epoch, _packed(network)
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate * min(1.0, epoch / (job.warmup + 1))
        optimizer.step()
        if comm.rank == 0:
            write_atomic(Path(place) / EPOCH, str(epoch).encode())
        after = comm.meter.totals()
        sent = {name: after[name] - before.get(name, 0.0) for name in after if "wire_bytes" in name}
        epochs.append(
            {"seconds": time.perf_counter() - begin, "exact": exact, "loss": said[0].item(),
             "bytes": sum(sent.values()), "val": said[1].item() / len(given["val"])}
        )  # fmt: skip
    write_atomic(Path(place) / f"{comm.rank}.safetensors", kept)
    return {"epochs": epochs, "best_epoch": best_epoch, "memory_bytes": peak_memory()}


def _packed(network: GCNII) -> bytes:
    from safetensors.torch import save

    return save({name: one.clone() for name, one in network.state_dict().items()})


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _add_gradients(layer: nn.Linear, change: Tensor, x: Tensor) -> None:
    """Add the gradients of a linear layer to what it has.

    Args:
        layer: with gradients.
        change: [n, out], gradient of what went out.
        x: [n, in], what came in.
    """
    _grad(layer.weight).addmm_(change.T, x)
    _grad(layer.bias).add_(change.sum(0))
