"""What each overlap is worth, one after the other, for a job split in three dimensions.

Every rung is the schedule of the job, run by the pipeline simulator on the prices of its
passes; rungs differ in which communication lies on the critical path.

Source: Jiang et al., MegaScale, 2024, section 3 and table 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.arithmetic import flops_per_token
from shoal.cost.pipeline.simulator import MachineLinks, simulate
from shoal.cost.price.shares import passes_of
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, OpCosts, Work

TILES = 4
"""Pieces in which a product and its collective pass by each other."""
BATCH_GROWTH = 4
"""How much larger a batch LAMB allows at the same loss."""
_FREE = 1e6


@dataclass(frozen=True)
class Rung:
    """What was added, seconds of a step, tokens a second of the job, model FLOP/s over the peak."""

    name: str
    step_s: float
    tokens_per_s: float
    mfu: float


def ladder(work: Work, machine: Machine) -> list[Rung]:
    """From nothing overlapped to everything, and then the larger batch.

    Args:
        work: a job with tp > 1, pp > 1 and dp > 1.
        machine: where.

    Raises:
        PlanError: an axis of the job is 1, so there is nothing to overlap.
    """
    split = work.job.parallel
    for axis in ("tp", "pp", "dp"):
        require(
            getattr(split, axis) > 1,
            f"parallel.{axis}",
            getattr(split, axis),
            expected="more than 1: the ladder overlaps the communication of every axis",
            error=PlanError,
        )
    free = machine.model_copy(
        update={
            "links": tuple(
                link.model_copy(update={"bandwidth": link.bandwidth * _FREE, "latency_s": 0.0})
                for link in machine.links
            )
        }
    )
    with_tensor = Pricer(machine).passes(work)
    alone = Pricer(free).passes(work)
    links = MachineLinks(machine, split.attention())
    stride = split.world // split.pp
    hop = links.seconds(0, stride % split.world, with_tensor.boundary_bytes)
    replicas = table("shard").build(work.job.shard).estimate(work, machine)
    data_s = replicas.terms_s.get("collective", 0.0)
    peak = machine.device.peak_flops.get(work.job.precision) or max(
        machine.device.peak_flops.values()
    )

    def rung(
        name: str,
        *,
        tensor: float,
        tiled: bool = False,
        hops: bool = True,
        data: float = 1.0,
        growth: int = 1,
    ) -> Rung:
        def passed(kind: str) -> tuple[float, ...]:
            results = []
            for own, both in zip(alone.seconds[kind], with_tensor.seconds[kind], strict=True):
                sent = tensor * (both - own)
                if tiled:
                    sent = max(sent - own, sent / TILES)
                # A coupled hop keeps both ends: what came in, and what goes out.
                results.append(own + sent + (2 * hop if hops else 0.0))
            return tuple(results)

        costs = OpCosts(
            seconds={kind: passed(kind) for kind in alone.seconds if kind in "FBIW"},
            boundary_bytes=0.0 if hops else with_tensor.boundary_bytes,
        )
        part = table("schedule").build(split.schedule)
        steps = growth * passes_of(work.job)
        schedule = part.build(split.pp, steps, split.vpp)
        seconds = simulate(schedule, costs, None if hops else links).makespan + data * data_s
        tokens = growth * work.job.global_batch * work.job.seq_len
        flops = flops_per_token(work.shape, work.job.seq_len) * tokens
        return Rung(name, seconds, tokens / seconds, flops / seconds / peak / split.world)

    exposed = 1.0 / split.vpp
    return [
        rung("nothing", tensor=1.0),
        rung("parallel block", tensor=0.5),
        rung("tensor-parallel overlap", tensor=0.5, tiled=True),
        rung("pipeline overlap", tensor=0.5, tiled=True, hops=False),
        rung("data-parallel overlap", tensor=0.5, tiled=True, hops=False, data=exposed),
        rung(
            f"LAMB, {BATCH_GROWTH} times the batch",
            tensor=0.5,
            tiled=True,
            hops=False,
            data=exposed,
            growth=BATCH_GROWTH,
        ),
    ]
