"""Building blocks: every micro-batch repeats the passes of the first one at a fixed interval.

A rank has two stages in the shape of a V. How long a block holds activations, divided by the
interval, is how many of them a rank needs memory for.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules.common import vee

PERIOD = 6
"""Passes of one micro-batch on one rank: F, I and W of two stages, each one unit long."""


class ScheduleBlock(NamedTuple):
    """When one rank does the passes of the first micro-batch, in units.

    No two of the times may be equal modulo :data:`PERIOD`; weight gradients take the remaining
    slots.
    """

    forward_lower: int
    forward_upper: int
    backward_upper: int
    backward_lower: int


def repeated(
    name: str, pp: int, microbatches: int, block: Callable[[int], ScheduleBlock]
) -> Schedule:
    """Passes of every rank sorted by their block's time plus a period for each micro-batch.

    Idle places close up when it runs.
    """
    programs = []
    for rank in range(pp):
        passes = _passes(block(rank), rank, 2 * pp - 1 - rank)
        timed = sorted(
            (at + PERIOD * mb, Op(kind, stage, mb))
            for mb in range(microbatches)
            for at, kind, stage in passes
        )
        programs.append(tuple(op for _, op in timed))
    return Schedule(name, tuple(programs), vee(pp), microbatches)


def _passes(block: ScheduleBlock, lower: int, upper: int) -> list[tuple[int, str, int]]:
    """(time, kind, stage) of the first micro-batch's passes on the rank of two stages."""
    free = sorted(set(range(PERIOD)) - {at % PERIOD for at in block})
    # Two places of the period are left for the weights; sooner holds less.
    weights = min(
        (
            (_next(block.backward_upper, one), _next(block.backward_lower, other))
            for one, other in (free, free[::-1])
        ),
        key=sum,
    )
    return [
        (block.forward_lower, "F", lower),
        (block.forward_upper, "F", upper),
        (block.backward_upper, "I", upper),
        (block.backward_lower, "I", lower),
        (weights[0], "W", upper),
        (weights[1], "W", lower),
    ]


def _next(after: int, residue: int) -> int:
    """The first time beyond ``after`` that is ``residue`` within the period."""
    return after + 1 + (residue - after - 1) % PERIOD
