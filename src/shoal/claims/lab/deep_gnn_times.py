"""An epoch of a deep graph network over links that this machine does not have.

The passes of a layer are timed here, over the rows that each rank would have; what is sent takes
its bytes over the bandwidth. Ranks wait for the slowest of them, and of the chunks of a pipeline
all count as the slowest one.

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from shoal.core.measure import interleave
from shoal.core.parts import table
from shoal.cost.pipeline.simulator import UniformLinks, simulate
from shoal.fields.graph.deep.costs import DeepWork
from shoal.fields.graph.deep.network import StaleLayer, spread
from shoal.fields.graph.deep.partition import LocalRows, NodeDivision, RowChunk, normalised
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.graph.graph import CSRGraph
from shoal.ir.schedule import OpCosts


@dataclass(frozen=True)
class TimedSplit:
    """A split of ranks, and what a layer takes in it.

    Args:
        work: of an epoch.
        forward: seconds of a layer, of the slowest rank's slowest chunk.
        backward: the same, of its backward pass.
        taken: rows that the rank which takes most of them takes in a layer.
    """

    work: DeepWork
    forward: float
    backward: float
    taken: int

    def epoch_s(self, links: UniformLinks, *, exact: float = 0.0) -> float:
        """Seconds of an epoch whose messages take these links.

        Args:
            links: between ranks.
            exact: share of the epochs that have one chunk.
        """
        if exact and self.work.grid.chunks > 1:
            many = self.work.grid.chunks
            grid = self.work.grid.model_copy(update={"chunks": 1})
            whole = replace(
                self, work=replace(self.work, grid=grid), forward=many * self.forward,
                backward=many * self.backward,
            )  # fmt: skip
            return exact * whole.epoch_s(links) + (1 - exact) * self.epoch_s(links)
        work, grid, d = self.work, self.work.grid, self.work.hidden
        layers = work.layers / grid.stages
        wait = links.seconds(0, 1, 4.0 * d * self.taken / grid.chunks) if grid.parts > 1 else 0.0
        boundary = 4.0 * d * work.num_nodes / (grid.chunks * grid.parts)
        # A link has one chunk at a time: stages go no faster than it does.
        least = links.seconds(0, 1, boundary) if grid.stages > 1 else 0.0
        cost = OpCosts.uniform(
            grid.stages,
            forward=max(layers * (self.forward + wait), least),
            backward=max(layers * (self.backward + wait), least),
            boundary_bytes=boundary,
        )
        schedule = table("schedule").build("gpipe").build(grid.stages, grid.chunks)
        shared = (work.features + 1) * d + (d + 1) * work.classes
        own = d * d * layers if grid.parts > 1 else 0.0
        sums = [(shared, grid.world), (own, grid.parts)]
        gradients = sum(
            links.seconds(0, 1, 8.0 * numbers * (ranks - 1) / ranks) for numbers, ranks in sums
        )
        return simulate(schedule, cost, links).makespan + gradients


def timed_split(graph: CSRGraph, division: NodeDivision, work: DeepWork, rounds: int) -> TimedSplit:
    """Time the passes of a layer over every chunk of every part, in turn, in one thread."""
    matrix, grid = normalised(graph), work.grid
    parts = [LocalRows.of(matrix, division, part, grid) for part in range(grid.parts)]
    arms: dict[str, Callable[[], None]] = {}
    with torch.no_grad():
        for at, rows in enumerate(parts):
            layer = StaleLayer(1, _weight(work.hidden), len(rows.own), rows.total)
            for number, chunk in enumerate(rows.chunks):
                arms |= dict(_passes(f"{at} {number}", layer, chunk, work.hidden))
        seconds = interleave(arms, rounds, warmup=1, seed=0).seconds
    middle = {name: sorted(one)[len(one) // 2] for name, one in seconds.items()}
    most = {way: max(s for name, s in middle.items() if name.startswith(way)) for way in "fb"}
    taken = max(rows.total - len(rows.own) for rows in parts)
    return TimedSplit(work, most["f"], most["b"], taken)


def _weight(width: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(width, width))
    weight.grad = torch.zeros(width, width)
    return weight


def _passes(
    name: str, layer: StaleLayer, chunk: RowChunk, width: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    x = torch.randn(chunk.n, width)

    def forward() -> None:
        layer.h[chunk.rows] = x
        layer.forward(chunk.rows, chunk.matrix, x)

    def backward() -> None:
        layer.backward(chunk.rows, x)
        spread(chunk.matrix, layer.g)

    yield f"f {name}", forward
    yield f"b {name}", backward


def split_grid(split: str, ranks: int) -> RankGrid:
    """The grid of a split with its default options."""
    grid: RankGrid = table("graph_split").build(split).grid(ranks)
    return grid
