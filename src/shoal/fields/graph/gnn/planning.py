"""Plans of training a network: every aggregator, by rates of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.graph.gnn.costs import rates_of
from shoal.fields.graph.gnn.inputs import ClassifiedGraph, check_batches, classified_graph
from shoal.fields.graph.gnn.job import TrainGnnJob, TrainGnnPlan
from shoal.fields.graph.gnn.protocols import AggregateWork, GnnRates, NeighbourAggregator
from shoal.ir import Interval, Machine

# The interpreter with torch, SciPy and what else is loaded, as it was measured.
_RUNTIME = 4.5e8


def plan_gnn(job: TrainGnnJob, machine: Machine) -> list[TrainGnnPlan]:
    """The ways to do it, the fastest first; what does not fit comes last.

    Raises:
        ShoalError: the graph cannot be read.
    """
    check_batches(job)
    data, rates = classified_graph(job), rates_of(machine)
    if job.fanouts:
        from shoal.fields.graph.gnn.batches import plan_batches

        return plan_batches(job, machine, data, rates)
    plans = [_plan(job, machine, choice, data, rates) for choice in choices(job.aggregator)]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["epoch_s"].value))


def choices(given: Choice | None, kind: str = "aggregator") -> Iterator[Choice]:
    """What the job says; every part of the kind where it says nothing."""
    if given is not None:
        yield given
        return
    for name in table(kind):
        yield Choice(name=name)


def features_of(job: TrainGnnJob, data: ClassifiedGraph) -> int:
    """Numbers of a node's features."""
    return job.feature_dim if data.features is None else data.features.shape[1]


def step_cost(
    job: TrainGnnJob,
    machine: Machine,
    method: NeighbourAggregator,
    rates: GnnRates,
    data: ClassifiedGraph,
    nodes: float,
    layers: Sequence[tuple[float, float, int]],
) -> tuple[Mapping[str, float], float]:
    """Seconds of a step by cause, on one core, and bytes.

    Args:
        job: what is trained.
        machine: where.
        method: how neighbours are pooled.
        rates: of a core.
        data: the graph.
        nodes: whose features come in.
        layers: of each convolution the nodes that pool, their neighbours in all, and the most of
            one.
    """
    width, features = job.hidden, features_of(job, data)
    out = layers[-1][0]

    def work(segments: float, entries: float, largest: int) -> AggregateWork:
        return AggregateWork(
            segments=round(segments),
            entries=round(entries),
            largest=largest,
            width=width,
            rates=rates,
        )

    # Of the first layer the gradient of its input is not wanted.
    costs = [
        work(*layers[-1]).estimate(
            flops=2.0 * (nodes * features * 2 / 3 + out * data.num_classes) * width,
            numbers=nodes * (1.5 * features + 2 * width) + out * (width + 2 * data.num_classes),
            gathered=0,
            calls=40,
            kept=nodes * (2 * features + 2 * width) + out * (width + 3 * data.num_classes),
        )
    ]
    for segments, entries, largest in layers:
        each = work(segments, entries, largest)
        costs.append(method.estimate(each, machine))
        costs.append(
            each.estimate(
                flops=4.0 * segments * width**2,
                numbers=5.0 * segments * width,
                gathered=entries * width,
                calls=12,
                kept=(entries + 5.0 * segments) * width,
            )
        )
    terms = {name: sum(cost.terms_s[name] for cost in costs) for name in costs[0].terms_s}
    return terms, sum(cost.memory_total for cost in costs)


def on_threads(terms: Mapping[str, float], job: TrainGnnJob, machine: Machine) -> float:
    """Seconds of a step; what is computed is shared by threads, what waits for others is not."""
    threads = min(job.threads, machine.device.num_cores or job.threads)
    return terms["overhead"] + (terms["matmul"] + terms["memory"]) / threads


def whole_graph(
    job: TrainGnnJob,
    machine: Machine,
    method: NeighbourAggregator,
    rates: GnnRates,
    data: ClassifiedGraph,
    drawn: np.ndarray,
) -> tuple[Mapping[str, float], float]:
    """Cost of a step over all nodes; see :func:`step_cost`.

    Args:
        job: what is trained.
        machine: where.
        method: how neighbours are pooled.
        rates: of a core.
        data: the graph.
        drawn: [N], neighbours of each node that are pooled.
    """
    nodes = data.graph.num_nodes
    layer = (float(nodes), float(drawn.sum()), int(drawn.max(initial=0)))
    return step_cost(job, machine, method, rates, data, nodes, [layer] * job.layers)


def memory_of(job: TrainGnnJob, data: ClassifiedGraph, kept: float) -> float:
    """Bytes of the process: what passes keep, features, graph and libraries."""
    features = 4.0 * data.graph.num_nodes * features_of(job, data)
    return kept + features + 24.0 * data.graph.nnz + _RUNTIME


def _plan(
    job: TrainGnnJob, machine: Machine, choice: Choice, data: ClassifiedGraph, rates: GnnRates
) -> TrainGnnPlan:
    method: NeighbourAggregator = table("aggregator").build(choice, where="aggregator")
    nodes = data.graph.num_nodes
    sizes = np.diff(data.graph.indptr)
    drawn = np.minimum(sizes, job.neighbours) if job.neighbours else sizes
    terms, kept = whole_graph(job, machine, method, rates, data, drawn)
    epoch, memory = on_threads(terms, job, machine), memory_of(job, data, kept)
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("aggregator").spell(method)
    most = max(terms, key=lambda name: terms[name])
    depth = method.depth(int(drawn.max(initial=0)))
    return TrainGnnPlan(
        job=job.model_copy(update={"aggregator": spelled}),
        machine=machine,
        predicted={
            "epoch_s": Interval.around(epoch, rates.spread),
            # The validation of each epoch is about half a step.
            "train_s": Interval.around(1.5 * epoch * job.epochs * job.runs, 1.2 * rates.spread),
            "memory_bytes": Interval.around(memory, 0.5),
        },
        planner="rates of this processor",
        fits=not capacity or memory <= capacity,
        why=f"{spelled}: {nodes:,} nodes, {int(drawn.sum()):,} neighbours, {depth:,} operations "
        f"deep; most time in {most}",
        num_nodes=nodes,
        nnz=data.graph.nnz,
        depth=depth,
    )
