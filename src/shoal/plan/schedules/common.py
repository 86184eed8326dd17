"""What the builders of schedules share: legal numbers, placements, the price of boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, repeat
from typing import ClassVar, Self

from shoal.core.errors import PlanError, require
from shoal.cost.pipeline.simulator import MachineLinks
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.ir.estimate import Estimate, Interval
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Op

# Twice as fast as Op(...), which matters with two million passes.
_OP = partial(tuple.__new__, Op)


def passes(kind: str, stages: Iterable[int], mbs: Iterable[int]) -> list[Op]:
    """Passes of one kind."""
    return list(map(_OP, zip(repeat(kind), stages, mbs, strict=False)))


def check_numbers(name: str, pp: int, microbatches: int, vpp: int, chunks: int | None) -> None:
    """Refuse numbers that schedule ``name`` has no order for.

    Raises:
        PlanError: names the number and those that fit.
    """
    require(pp >= 1, "parallel.pp", pp, expected="at least 1", error=PlanError)
    require(microbatches >= 1, "microbatches", microbatches, expected="at least 1", error=PlanError)
    legal = "at least 1" if chunks is None else str(chunks)
    require(
        vpp >= 1 if chunks is None else vpp == chunks,
        "parallel.vpp",
        vpp,
        expected=f"{legal} with schedule {name}",
        error=PlanError,
    )


def looped(pp: int, vpp: int) -> tuple[int, ...]:
    """Rank of each stage when they go round: rank r has stages r, r + pp, ..."""
    return tuple(range(pp)) * vpp


def vee(pp: int) -> tuple[int, ...]:
    """Rank of each stage when they go down and up again: rank 0 has the first and the last."""
    return (*range(pp), *reversed(range(pp)))


def sends(place: Sequence[int]) -> int:
    """Boundaries, forward and backward, that the busiest rank sends for one micro-batch."""
    sent = [0] * (max(place) + 1)
    for below, above in pairwise(place):
        if below != above:
            sent[below] += 1
            sent[above] += 1
    return max(sent)


def boundary_estimate(work: Work, machine: Machine, place: Sequence[int]) -> Estimate:
    """Bytes that the busiest rank sends to its neighbours in one step, and their seconds.

    A boundary is [microbatch, seq_len / cp, hidden / tp] in fp32; the slowest link between
    neighbours counts.
    """
    job, number = work.job, sends(place)
    nothing = Estimate(step_s=Interval(value=0.0, low=0.0, high=0.0), terms_s={"collective": 0.0})
    if not number:
        return nothing
    microbatch = microbatch_of(job)
    steps = passes_of(job, microbatch)
    split = job.parallel.tp * job.parallel.cp
    size = 4.0 * microbatch * job.seq_len * work.shape.hidden / split
    links = MachineLinks(machine, job.parallel.attention())
    pairs = {(a, b) for a, b in pairwise(place) if a != b}
    slowest = max(sorted(pairs), key=lambda pair: links.seconds(pair[0], pair[1], size))
    scope = links.scope(*slowest)
    if not scope:
        return nothing
    seconds = steps * number * links.seconds(*slowest, size)
    return Estimate(
        step_s=Interval.around(seconds, 0.3),
        terms_s={"collective": seconds},
        wire_bytes={scope: steps * number * size},
    )


class OneStage:
    """What schedules with one stage a rank share."""

    chunks: ClassVar[int | None] = 1

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of the boundaries, each forward and back."""
        return boundary_estimate(work, machine, looped(work.job.parallel.pp, 1))


class VShaped:
    """What schedules share whose ranks have two chunks, in the shape of a V."""

    traits: ClassVar[frozenset[str]] = frozenset({"several_stages", "splits_backward"})
    chunks: ClassVar[int | None] = 2

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """Where a rank has two equal chunks, and no ranks share sequences."""
        split = work.job.parallel
        if split.cp == 1 and work.shape.num_layers % (2 * split.pp) == 0:
            yield cls(), 2

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of the boundaries of both chunks; the turn of the V stays on its rank."""
        return boundary_estimate(work, machine, vee(work.job.parallel.pp))
