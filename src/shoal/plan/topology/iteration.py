"""Seconds of a training step on given devices: a simulated pipeline, then gradients' sums.

Source: Yang et al., Holmes, 2023, sections 3.2 to 3.4 (what crosses; the overlapped distributed
optimizer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shoal.core.parts import Choice, table
from shoal.cost.arithmetic import parameters
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.price.shares import microbatch_of
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import OpCosts, Parallel, Schedule, TrainJob, Work
from shoal.plan.partition import block_costs
from shoal.plan.topology.clusters import Clusters
from shoal.plan.topology.groups import DegreeGrid, Group, groups


class IterationCosts(NamedTuple):
    """Times of a job's passes on a device of the first cluster, and bytes of its messages.

    Args:
        forward_s: of one block, one micro-batch, its tensor parallelism included.
        backward_s: the same, backward.
        embed_s: forward and backward of the embedding.
        head_s: forward and backward of final norm and output layer.
        block_bytes: of one block's gradients, on a tensor-parallel rank.
        embed_bytes: of the embedding's.
        head_bytes: of the output layer's.
        boundary_bytes: that a rank sends to the next stage for a micro-batch.
        layers: blocks.
        microbatches: of a step, in a replica.
    """

    forward_s: float
    backward_s: float
    embed_s: tuple[float, float]
    head_s: tuple[float, float]
    block_bytes: float
    embed_bytes: float
    head_bytes: float
    boundary_bytes: float
    layers: int
    microbatches: int


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Args:
        seconds: of the whole.
        pipeline_s: until the last pass ends.
        sync_s: by stage, summing its gradients.
        busy_s: by stage, its passes.
        stages: blocks of each stage.
    """

    seconds: float
    pipeline_s: float
    sync_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    stages: tuple[int, ...]


def costs_of(job: TrainJob, clusters: Clusters, grid: DegreeGrid) -> IterationCosts:
    """Price the passes on the first cluster's devices; others are slower or faster as a whole.

    Raises:
        PlanError: the shape cannot be priced.
    """
    shape = shape_of(job)
    count = shape.num_layers
    micro = microbatch_of(job)
    # One stage for each block, and one micro-batch: what a block takes by itself.
    alone = job.model_copy(
        update={
            "parallel": Parallel(pp=count, tp=grid.tp, schedule=Choice(name="1f1b")),
            "global_batch": micro,
            "microbatch": micro,
        }
    )
    machine = clusters.machines[0].model_copy(update={"nodes": max(1, count)})
    passes = Pricer(machine).passes(Work(job=alone, shape=shape))
    ahead, behind = passes.seconds["F"], passes.seconds["B"]
    at = 1 if count > 2 else 0
    forward, backward = ahead[at], behind[at]
    few = count > 2
    every = 4.0 * parameters(shape) / grid.tp
    outside = 4.0 * shape.vocab_size * shape.hidden / grid.tp
    held = outside * (1 if shape.tied else 2)
    return IterationCosts(
        forward,
        backward,
        (ahead[0] - forward, behind[0] - backward) if few else (0.0, 0.0),
        (ahead[-1] - forward, behind[-1] - backward) if count > 1 else (0.0, 0.0),
        max(0.0, every - held) / count,
        outside,
        outside,
        passes.boundary_bytes,
        count,
        max(1, job.global_batch // grid.dp // micro),
    )


def layer_weights(job: TrainJob) -> tuple[float, ...]:
    """Arithmetic of each block, the last one with the output layer."""
    blocks, output = block_costs(shape_of(job), seq_len=job.seq_len)
    return (*blocks[:-1], blocks[-1] + output)


class _Links(NamedTuple):
    """Between neighbouring stages: latency and byte/s of the slowest chain."""

    latency_s: float
    bandwidths: tuple[float, ...]

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        if source == target:
            return 0.0
        return self.latency_s + nbytes / self.bandwidths[min(source, target)]


@lru_cache(maxsize=64)
def _schedule(pp: int, microbatches: int) -> Schedule:
    schedule: Schedule = table("schedule").build("1f1b").build(pp, microbatches, 1)
    return schedule


def step_of(
    clusters: Clusters,
    devices: Sequence[int],
    grid: DegreeGrid,
    costs: IterationCosts,
    stages: Sequence[int],
    *,
    overlap: bool = False,
) -> SimulatedStep:
    """Simulate one step.

    Args:
        clusters: what there is.
        devices: by rank, its device.
        grid: the split.
        costs: of :func:`costs_of`.
        stages: blocks of each stage.
        overlap: gradients are scattered behind the last backward pass and new weights gathered
            behind the next forward pass, in pieces; else both come after.
    """
    slow = [
        min(clusters.speeds[clusters.places[d].cluster] for d in members) / clusters.speeds[0]
        for members in _by_stage(devices, grid)
    ]
    ahead = [n * costs.forward_s / s for n, s in zip(stages, slow, strict=True)]
    behind = [n * costs.backward_s / s for n, s in zip(stages, slow, strict=True)]
    for seconds, at in ((ahead, 0), (behind, 1)):
        seconds[0] += costs.embed_s[at] / slow[0]
        seconds[-1] += costs.head_s[at] / slow[-1]
    passes = OpCosts(
        seconds={"F": tuple(ahead), "B": tuple(behind)}, boundary_bytes=costs.boundary_bytes
    )
    timeline = simulate(
        _schedule(grid.pp, costs.microbatches), passes, _chains(clusters, devices, grid)
    )
    ends = [float(timeline.end[timeline.rank == rank].max()) for rank in range(grid.pp)]
    sums = _sync(groups(clusters, devices, grid, "dp"), grid, costs, stages)
    late = []
    for end, sync, forward, backward in zip(ends, sums, ahead, behind, strict=True):
        if overlap:
            sync = max(0.0, sync / 2 - backward) + max(0.0, sync / 2 - forward)
        late.append(end + sync)
    return SimulatedStep(max(late), timeline.makespan, tuple(sums), timeline.busy, tuple(stages))


def _by_stage(devices: Sequence[int], grid: DegreeGrid) -> list[Sequence[int]]:
    size = grid.per_stage
    return [devices[start : start + size] for start in range(0, grid.world, size)]


def _chains(clusters: Clusters, devices: Sequence[int], grid: DegreeGrid) -> _Links:
    """Rates between neighbouring stages, while all ranks of both send."""
    latency, rates = 0.0, []
    stages = _by_stage(devices, grid)
    for one, other in pairwise(stages):
        # Two stages at a time: others send when these compute.
        pair = DegreeGrid(2, grid.dp, grid.tp)
        result = groups(clusters, [*one, *other], pair, "pp")
        rates.append(min(group.bandwidth for group in result))
        latency = max(latency, *(group.latency_s for group in result))
    return _Links(latency, tuple(rates))


def _sync(
    found: Sequence[Group], grid: DegreeGrid, costs: IterationCosts, stages: Sequence[int]
) -> list[float]:
    """By stage, seconds of an all-reduce of its gradients."""
    sizes = [n * costs.block_bytes for n in stages]
    sizes[0] += costs.embed_bytes
    sizes[-1] += costs.head_bytes
    if grid.dp == 1:
        return [0.0] * grid.pp
    seconds = []
    for stage, nbytes in enumerate(sizes):
        own = found[stage * grid.tp : (stage + 1) * grid.tp]
        rate = min(group.bandwidth for group in own)
        delay = max(group.latency_s for group in own)
        steps = 2 * (grid.dp - 1)
        seconds.append(steps * (nbytes / grid.dp / rate + delay))
    return seconds
