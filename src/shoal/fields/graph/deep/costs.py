"""What an epoch costs: rates of a core, passes of a stage, bytes between ranks.

Bytes follow from counts. A pipeline sends ``2 (S - 1) V d`` numbers an epoch, parts of nodes
``2 L R d``, with R the rows that parts hold of each other's nodes; gradients of parameters are
added.

Source: Chen et al., GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.core.config import Value
from shoal.core.parts import table
from shoal.cost.pipeline.simulator import UniformLinks, simulate
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.rates import least_seconds, machine_rates
from shoal.ir import Machine
from shoal.ir.schedule import OpCosts

# FLOP/s in fp32 of the core whose rates are below: one of AMD's Zen 5.
_FLOPS = 1.4e11


class DeepRates(Value):
    """What steps of a layer take on one core.

    Args:
        flop_s: seconds for a floating-point operation of a matrix product.
        number_s: for a number that an elementwise operator reads and writes.
        add_s: for a number of a neighbour's vector that is fetched and added.
        call_s: for an operator on few numbers.
        spread: of what follows from them.
    """

    flop_s: float
    number_s: float
    add_s: float
    call_s: float
    spread: float


_THERE = DeepRates(flop_s=3e-11, number_s=4e-10, add_s=3e-10, call_s=4e-6, spread=0.8)


def rates_of(machine: Machine) -> DeepRates:
    """How fast a core of a machine is: timed if it is this one, else by its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(machine, "deep_gnn.json", _THERE, timed, _FLOPS)


def timed() -> DeepRates:
    """Time the steps of a layer on one core of this machine."""
    import numpy as np
    import torch

    from shoal.core.random import generator
    from shoal.fields.graph.deep.network import spread
    from shoal.fields.graph.deep.partition import normalised
    from shoal.fields.graph.graph import CSRGraph
    from shoal.kernel.threads import torch_threads

    rows, width = 20_000, 64
    ends = generator(0, purpose="graph that is timed").integers(0, rows, (2, 5 * rows))
    matrix = normalised(CSRGraph.from_edges(*ends, num_nodes=rows))
    with torch_threads(1), torch.no_grad():
        x, square, few = torch.ones(rows, width), torch.ones(width, width), torch.ones(4)
        product = least_seconds(lambda: torch.mm(x, square), 5)[0]
        number = least_seconds(lambda: x.mul_(0.5).add_(x), 5)[0] / 2
        add = least_seconds(lambda: spread(matrix, x), 5)[0]
        call = least_seconds(lambda: [few.add_(1) for _ in range(100)], 5)[0] / 100
    entries = float(np.asarray(matrix.nnz))
    return DeepRates(
        flop_s=product / (2 * rows * width**2), number_s=number / (rows * width),
        add_s=add / (entries * width), call_s=call, spread=0.4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepWork:
    """What is trained in an epoch.

    Args:
        grid: of the ranks.
        num_nodes: of the graph.
        nnz: entries of its adjacency matrix, those of the nodes themselves included.
        largest: share of the work that the rank with most of it has, over its even share.
        replicas: rows that parts hold of each other's nodes, summed over the parts.
        features: numbers of a node's vector.
        hidden: numbers of a hidden one.
        classes: that nodes are assigned to.
        layers: convolutions.
    """

    grid: RankGrid
    num_nodes: int
    nnz: int
    largest: float
    replicas: int
    features: int
    hidden: int
    classes: int
    layers: int

    def passes(self, rates: DeepRates) -> tuple[float, float]:
        """Seconds of the forward and of the backward pass of all layers, for one chunk's rows."""
        rows = self.num_nodes / (self.grid.parts * self.grid.chunks)
        entries = self.nnz / (self.grid.parts * self.grid.chunks)
        d, stages = self.hidden, self.grid.stages
        each = entries * d * rates.add_s + 2 * rows * d * d * rates.flop_s
        forward = self.layers * (each + 8 * rows * d * rates.number_s + 9 * rates.call_s)
        # Two products more: the gradients of the matrix, and of what comes in.
        again = each + 2 * rows * d * d * rates.flop_s
        backward = self.layers * (again + 10 * rows * d * rates.number_s + 12 * rates.call_s)
        # Every stage works out the first vectors.
        enter = stages * 2 * rows * self.features * d * rates.flop_s
        return forward + enter, backward + enter

    def epoch_s(
        self, rates: DeepRates, links: UniformLinks, cores: int, *, exact: float = 0.0
    ) -> float:
        """Seconds of an epoch.

        Args:
            rates: of a core.
            links: between ranks.
            cores: that the ranks share.
            exact: share of the epochs that have one chunk.
        """
        if exact and self.grid.chunks > 1:
            whole = replace(self, grid=self.grid.model_copy(update={"chunks": 1}))
            slow = whole.epoch_s(rates, links, cores)
            return exact * slow + (1 - exact) * self.epoch_s(rates, links, cores)
        grid = self.grid
        # Ranks wait for the one with most of a chunk; those that are busy share the cores.
        busy = grid.parts * min(grid.stages, grid.chunks)
        slow = self.largest * max(1.0, busy / cores)
        forward, backward = (slow * one / grid.stages for one in self.passes(rates))
        per_chunk = 4.0 * self.replicas / grid.chunks * self.hidden / max(grid.parts, 1)
        exchange = self.layers / grid.stages * links.seconds(0, 1, per_chunk)
        exchange = exchange if grid.parts > 1 else 0.0
        cost = OpCosts.uniform(
            grid.stages,
            forward=forward + exchange,
            backward=backward + exchange,
            boundary_bytes=4.0 * self.num_nodes * self.hidden / (grid.parts * grid.chunks),
        )
        schedule = table("schedule").build("gpipe").build(grid.stages, grid.chunks)
        return simulate(schedule, cost, links).makespan

    def sent_bytes(self) -> float:
        """Bytes that all ranks send in an epoch, those of parameters' gradients included."""
        grid, d = self.grid, self.hidden
        boundaries = 2.0 * (grid.stages - 1) * self.num_nodes * d
        neighbours = 2.0 * self.layers * self.replicas * d
        ends = (self.features + 1) * d + (d + 1) * self.classes
        # A ring sends every number twice, less one part of it.
        gradients = 2.0 * (grid.world - 1) * ends
        gradients += grid.stages * 2.0 * (grid.parts - 1) * d * d * self.layers / grid.stages
        progress = 2.0 * (grid.world - 1) * 2 * 2  # two numbers of 8 B
        return 4.0 * (boundaries + neighbours + gradients + progress)
