"""Plans of training a deep network: every split of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.core.parts import Choice, table
from shoal.core.sizes import human_bytes
from shoal.cost.pipeline.simulator import UniformLinks
from shoal.fields.graph.deep.costs import DeepRates, DeepWork, rates_of
from shoal.fields.graph.deep.inputs import deep_graph, divide
from shoal.fields.graph.deep.job import TrainDeepGnnJob, TrainDeepGnnPlan
from shoal.fields.graph.deep.partition import NodeDivision
from shoal.fields.graph.deep.protocols import DeepGnnError, GraphSplit, RankGrid
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.ir import Interval, Machine

# A rank's interpreter with torch and SciPy, as it was measured.
_RUNTIME = 3.5e8


def plan_deep(job: TrainDeepGnnJob, machine: Machine) -> list[TrainDeepGnnPlan]:
    """The ways to do it, the fastest first; what does not fit comes last.

    Raises:
        ShoalError: the graph cannot be read, or no split fits the ranks.
    """
    data, rates = deep_graph(job), rates_of(machine)
    plans, refused = [], []
    for choice in _choices(job):
        split: GraphSplit = table("graph_split").build(choice, where="split")
        try:
            grid = split.grid(job.ranks)
            division = divide(data, grid, job.layers)
        except DeepGnnError as cause:
            refused.append(str(cause))
            continue
        spelled = table("graph_split").spell(split)
        plans.append(_plan(job, machine, spelled, grid, division, data, rates))
    if not plans:
        raise DeepGnnError(refused[0])
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["epoch_s"].value))


def _choices(job: TrainDeepGnnJob) -> Iterator[Choice]:
    if job.split is not None:
        yield job.split
        return
    for name in table("graph_split"):
        yield Choice(name=name)


def work_of(
    job: TrainDeepGnnJob, grid: RankGrid, division: NodeDivision, data: ClassifiedGraph
) -> DeepWork:
    """What an epoch of a division is."""
    nnz = data.graph.nnz + data.graph.num_nodes
    entries = np.bincount(division.part, np.diff(data.graph.indptr) + 1, minlength=grid.parts)
    features = job.feature_dim if data.features is None else data.features.shape[1]
    return DeepWork(
        grid=grid,
        num_nodes=data.graph.num_nodes,
        nnz=nnz,
        largest=float(entries.max() / entries.mean()),
        replicas=division.replicas(data.graph),
        features=features,
        hidden=job.hidden,
        classes=data.num_classes,
        layers=job.layers,
    )


def _plan(
    job: TrainDeepGnnJob,
    machine: Machine,
    split: Choice,
    grid: RankGrid,
    division: NodeDivision,
    data: ClassifiedGraph,
    rates: DeepRates,
) -> TrainDeepGnnPlan:
    work = work_of(job, grid, division, data)
    link = machine.link("loopback") or machine.link("node")
    links = UniformLinks(link.bandwidth, link.latency_s) if link else UniformLinks()
    cores = machine.device.num_cores or grid.world
    exact = 1 / job.refresh if job.refresh else 0.0
    epoch = work.epoch_s(rates, links, cores, exact=exact)
    sent, local = work.sent_bytes(), (work.num_nodes + work.replicas) / grid.parts
    # Two vectors a row of what is current, one that a layer keeps, and which numbers are above 0.
    memory = job.layers / grid.stages * local * job.hidden * 13 + 12.0 * work.nnz
    memory = (memory + 4.0 * local * work.features + _RUNTIME) * grid.world
    capacity = machine.device.main_memory.capacity_bytes
    return TrainDeepGnnPlan(
        job=job.model_copy(update={"split": split}),
        machine=machine,
        predicted={
            "epoch_s": Interval.around(epoch, rates.spread),
            "train_s": Interval.around(epoch * job.epochs * job.runs, 1.2 * rates.spread),
            "sent_bytes": Interval.around(sent, 0.02),
            "memory_bytes": Interval.around(memory, 0.5),
        },
        planner="rates of this processor",
        fits=not capacity or memory <= capacity,
        why=f"{split}: stages {grid.stages}, ranks of a stage {grid.parts}, chunks {grid.chunks}; "
        f"{human_bytes(sent)} an epoch between ranks",
        grid=grid,
        num_nodes=work.num_nodes,
        replicas=work.replicas,
    )
