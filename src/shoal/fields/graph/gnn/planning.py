"""Plans of training a network: every aggregator, by rates of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.graph.gnn.costs import rates_of
from shoal.fields.graph.gnn.inputs import ClassifiedGraph, classified_graph
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
    data, rates = classified_graph(job), rates_of(machine)
    plans = [_plan(job, machine, choice, data, rates) for choice in _choices(job)]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.predicted["epoch_s"].value))


def _choices(job: TrainGnnJob) -> Iterator[Choice]:
    if job.aggregator is not None:
        yield job.aggregator
        return
    for name in table("aggregator"):
        yield Choice(name=name)


def _plan(
    job: TrainGnnJob, machine: Machine, choice: Choice, data: ClassifiedGraph, rates: GnnRates
) -> TrainGnnPlan:
    method: NeighbourAggregator = table("aggregator").build(choice, where="aggregator")
    nodes, width = data.graph.num_nodes, job.hidden
    features = job.feature_dim if data.features is None else data.features.shape[1]
    sizes = np.diff(data.graph.indptr)
    drawn = np.minimum(sizes, job.neighbours) if job.neighbours else sizes
    entries = int(drawn.sum())
    work = AggregateWork(
        segments=nodes, entries=entries, largest=int(drawn.max(initial=0)), width=width, rates=rates
    )
    pooled = method.estimate(work, machine)
    # Of the first layer the gradient of its input is not wanted.
    first = work.estimate(
        flops=2.0 * nodes * (features * 2 / 3 + data.num_classes) * width,
        numbers=nodes * (1.5 * features + 3 * width + 2 * data.num_classes),
        gathered=0, calls=40, kept=nodes * (2 * features + 3 * width + 3 * data.num_classes),
    )  # fmt: skip
    each = work.estimate(
        flops=4.0 * nodes * width**2, numbers=5.0 * nodes * width, gathered=entries * width,
        calls=12, kept=entries * width + 5.0 * nodes * width,
    )  # fmt: skip
    threads = min(job.threads, machine.device.num_cores or job.threads)
    terms = {
        name: first.terms_s[name] + job.layers * (each.terms_s[name] + pooled.terms_s[name])
        for name in first.terms_s
    }
    # What is computed is shared by the threads; what waits for each other is not.
    epoch = terms["overhead"] + (terms["matmul"] + terms["memory"]) / threads
    memory = first.memory_total + job.layers * (each.memory_total + pooled.memory_total)
    memory += 4.0 * nodes * features + 24.0 * data.graph.nnz
    capacity = machine.device.main_memory.capacity_bytes
    spelled = table("aggregator").spell(method)
    most = max(terms, key=lambda name: terms[name])
    depth = method.depth(work.largest)
    return TrainGnnPlan(
        job=job.model_copy(update={"aggregator": spelled}),
        machine=machine,
        predicted={
            "epoch_s": Interval.around(epoch, rates.spread),
            # The validation of each epoch is about half a step.
            "train_s": Interval.around(1.5 * epoch * job.epochs * job.runs, 1.2 * rates.spread),
            "memory_bytes": Interval.around(memory + _RUNTIME, 0.5),
        },
        planner="rates of this processor",
        fits=not capacity or memory + _RUNTIME <= capacity,
        why=f"{spelled}: {nodes:,} nodes, {entries:,} neighbours, {depth:,} operations deep; "
        f"most time in {most}",
        num_nodes=nodes,
        nnz=data.graph.nnz,
        depth=depth,
    )
