"""Plans of training on sampled batches: every aggregator with every placement of the features.

A batch is drawn, its features are gathered, and it is trained on; the three work at the same time
on different batches, so that the slowest decides. Batches of the first epoch are drawn, and on this
machine a few are trained on, before anything is predicted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.native import cpu_model
from shoal.core.parts import Choice, table
from shoal.fields.graph.gather.costs import gather_work
from shoal.fields.graph.gather.costs import rates_of as gather_rates_of
from shoal.fields.graph.gather.protocols import FeaturePlacement
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.graph.gnn.job import TrainGnnJob, TrainGnnPlan
from shoal.fields.graph.gnn.planning import (
    choices,
    features_of,
    memory_of,
    on_threads,
    step_cost,
    whole_graph,
)
from shoal.fields.graph.gnn.protocols import GnnRates, NeighbourAggregator
from shoal.fields.graph.sample.neighbours import (
    NeighbourSampler,
    SampledNodes,
    epoch_samples,
)
from shoal.ir import Interval, Machine

# Batches that are drawn, and of these trained on, before anything is predicted.
_DRAWN, _REHEARSED = 32, 3
# Of what has been rehearsed on this machine.
_SPREAD = 0.25


@dataclass(frozen=True)
class BatchTimes:
    """Seconds of a batch.

    Args:
        sample: to draw it.
        gather: its features.
        train: to learn of it.
        batches: of an epoch.
    """

    sample: float
    gather: float
    train: float
    batches: int

    def epoch(self, cores: int) -> float:
        """Seconds of an epoch.

        Args:
            cores: with a single one nothing overlaps but a gather that waits.
        """
        each = (self.sample, self.gather, self.train)
        slowest = max(each) if cores > 1 else max(self.gather, self.sample + self.train)
        return sum(each) + (self.batches - 1) * slowest

    def __str__(self) -> str:
        """In milliseconds."""
        return (
            f"{1e3 * self.sample:.3g} ms to draw, {1e3 * self.gather:.3g} ms to gather, "
            f"{1e3 * self.train:.3g} ms to train"
        )


def plan_batches(
    job: TrainGnnJob, machine: Machine, data: ClassifiedGraph, rates: GnnRates
) -> list[TrainGnnPlan]:
    """The ways to do it, the fastest first; of equal ones the one that gathers faster.

    Args:
        job: has fan-outs.
        machine: where it runs.
        data: the graph.
        rates: of a core.
    """
    sampler = NeighbourSampler(data.graph, job.fanouts, job.seed)
    epoch = epoch_samples(sampler, data.train, job.batch_size, 1)
    samples = list(itertools.islice(epoch, _DRAWN))
    gather_rates = gather_rates_of(machine)
    work = gather_work(
        samples, np.diff(data.graph.indptr), features_of(job, data), gather_rates,
        job.host_bytes_per_s,
    )  # fmt: skip
    drawn = sum(len(one.neighbours) for batch in samples for one in batch.blocks) / len(samples)
    here = machine.fingerprint.get("cpu") == cpu_model()
    sizes, layers, made = np.diff(data.graph.indptr), _layers(samples), []
    for choice in choices(job.aggregator):
        method: NeighbourAggregator = table("aggregator").build(choice, where="aggregator")
        spelled = table("aggregator").spell(method)
        terms, kept = step_cost(job, machine, method, rates, data, work.rows, layers)
        train, spread = on_threads(terms, job, machine), rates.spread
        if here:
            train, spread = rehearsed(job, spelled, data, samples), _SPREAD
        whole, _ = whole_graph(job, machine, method, rates, data, sizes)
        # The validation of each epoch is about half a step over the whole graph.
        validated = 0.5 * on_threads(whole, job, machine)
        for placement in choices(job.placement, "feature_source"):
            part: FeaturePlacement = table("feature_source").build(placement, where="placement")
            cost, place = part.estimate(work, machine), table("feature_source").spell(part)
            times = BatchTimes(
                sample=drawn * gather_rates.sample_s, gather=cost.step_s.value, train=train,
                batches=-(-len(data.train) // job.batch_size),
            )  # fmt: skip
            epoch_s = times.epoch(machine.device.num_cores or 1)
            train_s = (epoch_s + validated) * job.epochs * job.runs
            host = cost.wire_bytes["host"] * times.batches
            memory = memory_of(job, data, kept + cost.memory_bytes["device"] + 4 * work.nbytes)
            capacity = machine.device.main_memory.capacity_bytes
            plan = TrainGnnPlan(
                job=job.model_copy(update={"aggregator": spelled, "placement": place}),
                machine=machine,
                predicted={
                    "epoch_s": Interval.around(epoch_s, spread),
                    "train_s": Interval.around(train_s, 1.2 * rates.spread),
                    "memory_bytes": Interval.around(memory, 0.5),
                    "host_bytes": Interval.around(host, 0.1),
                },
                planner="batches rehearsed here" if here else "rates of this processor",
                fits=not capacity or memory <= capacity,
                why=f"{spelled}, {place}: {times.batches} batches of {work.rows:,.0f} rows, "
                f"{times}",
                num_nodes=data.graph.num_nodes,
                nnz=data.graph.nnz,
                depth=method.depth(max(largest for _, _, largest in layers)),
            )
            made.append((not plan.fits, epoch_s, times.gather, plan))
    return [plan for *_, plan in sorted(made, key=lambda one: one[:3])]


def rehearsed(
    job: TrainGnnJob, choice: Choice, data: ClassifiedGraph, samples: Sequence[SampledNodes]
) -> float:
    """Seconds of a mean batch, trained on here with features of no meaning."""
    import torch

    from shoal.fields.graph.gnn.training import network_of, optimizer_of, step
    from shoal.kernel.threads import torch_threads

    features, seconds, rows = features_of(job, data), 0.0, 0
    some = samples[:_REHEARSED]
    with torch_threads(job.threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = network_of(job, choice, features, data.num_classes)
        optimizer = optimizer_of(job, network)
        for number, batch in enumerate([some[0], *some]):
            x = torch.randn(len(batch.nodes), features)
            blocks = [
                (torch.from_numpy(one.ptr), torch.from_numpy(one.neighbours))
                for one in batch.blocks
            ]
            classes = torch.zeros(batch.num_seeds, dtype=torch.int64)
            begin = time.perf_counter()
            step(network, optimizer, network.on_blocks(x, blocks), classes)
            if number:  # the first warms up
                seconds += time.perf_counter() - begin
                rows += len(batch.nodes)
    return seconds / rows * float(np.mean([len(one.nodes) for one in samples]))


def _layers(samples: Sequence[SampledNodes]) -> list[tuple[float, float, int]]:
    """Of each layer nodes that pool, their neighbours, and the most of one; means over batches."""
    result = []
    for blocks in zip(*(one.blocks for one in samples), strict=True):
        sizes = [np.diff(one.ptr) for one in blocks]
        result.append((
            float(np.mean([len(one) for one in sizes])),
            float(np.mean([one.sum() for one in sizes])),
            int(max(one.max(initial=0) for one in sizes)),
        ))  # fmt: skip
    return result
