"""Which device is which rank: gradients stay inside a cluster, only thin pipeline traffic crosses.

Tensor-parallel groups stay inside nodes. Searched are the degrees that are not given, which cluster
each stage is in (all ways where they are few, else clusters one after another and exchanges of two
stages), and whether a stage takes whole nodes of its cluster or some devices of each. Every
candidate is simulated.

The grid of ranks is the job's own, and with it which rows a replica reads: another order changes
who computes, never what.

Source: Yang et al., Holmes, 2023, sections 3.1 to 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.price.shares import microbatch_of
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import ModelShape, Parallel, TrainJob, Work
from shoal.plan.strategy.judge import usable_bytes
from shoal.plan.topology.clusters import Clusters
from shoal.plan.topology.groups import DegreeGrid, Group, crossing, groups
from shoal.plan.topology.iteration import (
    IterationCosts,
    SimulatedStep,
    costs_of,
    layer_weights,
    step_of,
)
from shoal.plan.topology.speed import adaptive, exact
from shoal.plan.topology.ways import assignments, candidates, improved, searched_whole

_BRUTE = 8


class RankOrder(NamedTuple):
    """An assignment of ranks to devices, and its step time.

    Args:
        devices: by rank, its device.
        step: simulated, with the better cut of the layers.
        rule: blocks of each stage by Holmes's rule.
        cut: blocks of each stage by the exact cut.
        memory_bytes: of the fullest rank, about.
        fits: its device has room for it.
        reason: why data-parallel groups cross clusters; empty where none does.
    """

    clusters: Clusters
    grid: DegreeGrid
    devices: tuple[int, ...]
    step: SimulatedStep
    rule: tuple[int, ...]
    cut: tuple[int, ...]
    memory_bytes: float
    fits: bool
    reason: str = ""

    def groups(self, axis: str) -> list[Group]:
        """Groups of tp, dp or pp."""
        return groups(self.clusters, self.devices, self.grid, axis)

    @property
    def crossing(self) -> int:
        """Data-parallel groups that are spread over several clusters."""
        return crossing(self.groups("dp"))

    def where(self, rank: int) -> str:
        """The device of a rank, as cluster/node/device; nodes are counted in their cluster."""
        place = self.clusters.places[self.devices[rank]]
        return f"{self.host(place.node)}/{place.device}"

    def host(self, node: int) -> str:
        """A node by its cluster's name, and its number in there."""
        for cluster in self.clusters.clusters:
            if node < cluster.nodes:
                return f"{cluster.name}/{node}"
            node -= cluster.nodes
        raise PlanError(f"node {node}: the clusters have fewer nodes; give a smaller number")

    @property
    def hosts(self) -> tuple[int, ...]:
        """Nodes in the order in which a launcher has to list them."""
        places = (self.clusters.places[device] for device in self.devices)
        return tuple(dict.fromkeys(place.node for place in places))

    def parallel(self) -> Parallel:
        """What a job says to run it, on hosts in the order of :attr:`hosts`."""
        return Parallel(
            pp=self.grid.pp,
            dp=self.grid.dp,
            tp=self.grid.tp,
            sp=self.grid.tp > 1,
            order="pp-dp-cp-tp",
            stages=self.step.stages if self.grid.pp > 1 else (),
        )


class Price:
    """Simulates orders of one job's grid, each once.

    Args:
        overlap: of the optimizer's collectives, as for ``step_of``.
        alpha: of Holmes's rule.
    """

    def __init__(
        self,
        job: TrainJob,
        clusters: Clusters,
        grid: DegreeGrid,
        *,
        overlap: bool = False,
        alpha: float = 1.05,
    ) -> None:
        self.job, self.clusters, self.grid = job, clusters, grid
        self.overlap, self.alpha = overlap, alpha
        self.costs: IterationCosts = costs_of(job, clusters, grid)
        self._cuts: dict[tuple[float, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._known: dict[
            tuple[int, ...], tuple[SimulatedStep, tuple[int, ...], tuple[int, ...]]
        ] = {}

    @cached_property
    def _weights(self) -> tuple[float, ...]:
        return layer_weights(self.job)

    def __call__(
        self, devices: Sequence[int]
    ) -> tuple[SimulatedStep, tuple[int, ...], tuple[int, ...]]:
        """The step of the better cut, Holmes's cut, and the exact one."""
        key = tuple(devices)
        if key not in self._known:
            size = self.grid.per_stage
            speeds = tuple(
                min(
                    self.clusters.speeds[self.clusters.places[d].cluster]
                    for d in devices[s : s + size]
                )
                for s in range(0, self.grid.world, size)
            )
            if speeds not in self._cuts:
                rule = adaptive(speeds, self.costs.layers, alpha=self.alpha)
                self._cuts[speeds] = rule, exact(speeds, self._weights)
            rule, cut = self._cuts[speeds]
            steps = [
                step_of(self.clusters, devices, self.grid, self.costs, one, overlap=self.overlap)
                for one in dict.fromkeys((rule, cut))
            ]
            self._known[key] = min(steps, key=lambda step: step.seconds), rule, cut
        return self._known[key]


def plan_order(
    job: TrainJob,
    clusters: Clusters,
    *,
    pp: int | None = None,
    tp: int | None = None,
    overlap: bool = False,
    alpha: float = 1.05,
) -> RankOrder:
    """The best ranks for a job on some clusters.

    A grid whose data-parallel groups stay inside clusters goes before any that does not, and one
    that fits before any that does not.

    Args:
        job: the model, its sequences and batch; of its split nothing is read.
        clusters: what there is.
        pp: stages; searched if not given.
        tp: ranks of a layer; searched if not given.
        overlap: of the optimizer's collectives, as for ``step_of``.
        alpha: of Holmes's rule.

    Raises:
        PlanError: no grid is legal.
    """
    shape = shape_of(job)
    legal = list(_grids(job, shape, clusters, pp, tp))
    require(
        bool(legal),
        "pp, tp",
        f"{pp or 'any'}, {tp or 'any'}",
        expected=f"pp * dp * tp = {clusters.num_devices} devices, with tp in a node of "
        f"{clusters.devices_per_node} and of the {shape.num_heads} heads, pp of at most "
        f"{shape.num_layers} and dp a divisor of {job.global_batch} sequences",
        error=PlanError,
    )
    results = [_best(job, shape, clusters, grid, overlap, alpha) for grid in legal]
    return min(results, key=lambda x: (not x.fits, x.crossing > 0, x.step.seconds, x.grid))


def _grids(
    job: TrainJob, shape: ModelShape, clusters: Clusters, pp: int | None, tp: int | None
) -> Iterator[DegreeGrid]:
    world = clusters.num_devices
    micro = microbatch_of(job)
    for t in range(1, clusters.devices_per_node + 1):
        if clusters.devices_per_node % t or (tp is not None and t != tp):
            continue
        if shape.num_heads % t or shape.num_kv_heads % t or shape.ffn_hidden % t:
            continue
        for p in range(1, min(world // t, shape.num_layers) + 1):
            dp = world // t // p
            if p * dp * t != world or (pp is not None and p != pp):
                continue
            if job.global_batch % dp == 0 and (job.global_batch // dp) % micro == 0:
                yield DegreeGrid(p, dp, t)


def _best(
    job: TrainJob,
    shape: ModelShape,
    clusters: Clusters,
    grid: DegreeGrid,
    overlap: bool,
    alpha: float,
) -> RankOrder:
    """The best order of stages for one grid."""
    priced = Price(job, clusters, grid, overlap=overlap, alpha=alpha)

    def seconds(devices: Sequence[int]) -> float:
        return priced(devices)[0].seconds

    reason = _why(clusters, grid)
    devices = min(candidates(clusters, grid, whole=not reason), key=seconds)
    if not reason and not searched_whole(clusters, grid):
        devices = improved(devices, grid, seconds)
    step, rule, cut = priced(devices)
    nbytes, fits = _memory(job, shape, clusters, grid, step)
    return RankOrder(clusters, grid, devices, step, rule, cut, nbytes, fits, reason)


def _memory(
    job: TrainJob, shape: ModelShape, clusters: Clusters, grid: DegreeGrid, step: SimulatedStep
) -> tuple[float, bool]:
    """Bytes of the fullest stage's rank by the cost model; whether the smallest device has them."""
    split = Parallel(pp=grid.pp, dp=grid.dp, tp=grid.tp, sp=grid.tp > 1)
    one = job.model_copy(update={"parallel": split, "microbatch": microbatch_of(job)})
    machine = clusters.machines[0].model_copy(
        update={"nodes": sum(cluster.nodes for cluster in clusters.clusters)}
    )
    even = math.fsum(Pricer(machine).memory(Work(job=one, shape=shape)).values())
    nbytes = even * max(1.0, max(step.stages) * grid.pp / shape.num_layers)
    room = min(usable_bytes(one, machine) for machine in clusters.machines)
    return nbytes, nbytes <= room


def _why(clusters: Clusters, grid: DegreeGrid) -> str:
    """Why stages of this grid cannot stay inside clusters."""
    size = grid.per_stage
    sizes = [one.nodes * clusters.devices_per_node for one in clusters.clusters]
    wrong = [
        f"{one.name} has {have}"
        for one, have in zip(clusters.clusters, sizes, strict=True)
        if have % size
    ]
    if not wrong:
        return ""
    shared = math.gcd(*sizes)
    stages = sorted(
        clusters.num_devices // each
        for each in range(grid.tp, shared + 1, grid.tp)
        if shared % each == 0
    )
    would = f"pp of {', '.join(map(str, stages))}" if stages else f"tp of a divisor of {shared}"
    return (
        f"a stage is dp * tp = {size} devices, and {', '.join(wrong)}, which is no multiple: some "
        f"stage lies in two clusters, and its gradients are summed over what joins them; {would} "
        f"would keep them inside"
    )


def brute(priced: Price) -> tuple[float, tuple[int, ...]]:
    """The best of all ways to give eight devices or fewer to ranks, and its seconds.

    Devices of a node are alike, and so are nodes of a cluster; tensor-parallel groups stay inside
    nodes.

    Raises:
        PlanError: more devices.
    """
    clusters, grid = priced.clusters, priced.grid
    require(
        clusters.num_devices <= _BRUTE,
        "devices",
        clusters.num_devices,
        expected=f"at most {_BRUTE}, of which all orders can be tried",
        error=PlanError,
    )
    best: tuple[float, tuple[int, ...]] | None = None
    for devices in assignments(clusters):
        nodes = [clusters.places[device].node for device in devices]
        apart = any(len({nodes[rank] for rank in ranks}) > 1 for ranks in grid.ranks("tp"))
        if apart:
            continue
        result = priced(devices)[0].seconds, devices
        if best is None or result < best:
            best = result
    assert best is not None  # devices in their own order are one way
    return best
