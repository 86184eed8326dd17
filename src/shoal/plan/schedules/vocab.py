"""Split embedding and output layer over all ranks of a pipeline, as passes of their own.

The vocabulary's two layers overload the first and the last rank. Here every rank has a shard of
both and does its part of them for every micro-batch: ``EF`` before the first stage, ``S`` and
``T`` between the last stage's forward and backward, ``EB`` after the first stage's backward. The
shards meet once or twice between ``S`` and the last stage's backward; so that no rank waits in a
meeting, all backwards move later by as many intervals of the schedule, and that many more
micro-batches are in flight, whatever the number of ranks.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from shoal.core.errors import PlanError, require
from shoal.cost.pipeline.simulator import simulate
from shoal.ir.schedule import Op, OpCosts, Schedule

# Forward, and the two halves of backward, one unit each: the interval is 3 a stage of a rank.
_FORWARD, _BACKWARD = 1.0, 2.0
# Passes that fall on one moment, in an order in which what is needed comes first.
_ORDER = {"EF": 0, "W": 1, "B": 2, "I": 2, "F": 3, "S": 4, "T": 5, "EB": 6}


def with_vocabulary(schedule: Schedule, barriers: Literal[1, 2]) -> Schedule:
    """``schedule`` with the passes of a vocabulary that is split over all its ranks.

    The moments of the schedule's own passes are taken from its simulation with equal stages;
    backwards move by ``barriers`` intervals, and the new passes stand, on all ranks alike, at

    - ``EF``: one interval before the first stage's forward,
    - ``S``: when the last stage's forward ends,
    - ``T``: one interval after ``S``,
    - ``EB``: when the first stage's backward ends.

    Each rank then does its passes in the order of these moments. A pass is never before one that
    it needs, so no rank waits for ever, whatever the schedule.

    Args:
        schedule: of any builder; of routes, too.
        barriers: 1 has the shards meet once, before the backward, with ``T`` at leisure; 2 have
            them meet before and after ``T``.

    Raises:
        PlanError: the schedule has such passes already, or ``barriers`` is neither 1 nor 2.
    """
    require(
        barriers in (1, 2), "parallel.vocab_barriers", barriers, expected="1 or 2", error=PlanError
    )
    require(
        not schedule.vocab_barriers,
        f"schedule {schedule.name}",
        f"vocab_barriers = {schedule.vocab_barriers}",
        expected="a schedule without passes of the vocabulary; give the one it was made from",
        error=PlanError,
    )
    timeline = simulate(
        schedule,
        OpCosts.uniform(schedule.stages, forward=_FORWARD, backward=_BACKWARD),
    )
    interval = (_FORWARD + _BACKWARD) * schedule.stages / schedule.ranks
    later = barriers * interval
    timed: list[list[tuple[float, int, int, Op]]] = [[] for _ in schedule.ops]
    opened, closed, returned = ([0.0] * schedule.microbatches for _ in range(3))
    for rank, op, start, end in timeline.events():
        moment = start if op.kind == "F" else start + later
        timed[rank].append((moment, _ORDER[op.kind], len(timed[rank]), op))
        if op.kind == "F":
            route = schedule.route(op.mb)
            if op.stage == route[0]:
                opened[op.mb] = start
            if op.stage == route[-1]:
                closed[op.mb] = end
        elif op.kind != "W" and op.stage == schedule.route(op.mb)[0]:
            returned[op.mb] = end + later
    for mb in range(schedule.microbatches):
        moments = (
            ("EF", opened[mb] - interval),
            ("S", closed[mb]),
            ("T", closed[mb] + interval),
            ("EB", returned[mb]),
        )
        for rank, mine in enumerate(timed):
            mine += [(moment, _ORDER[kind], mb, Op(kind, rank, mb)) for kind, moment in moments]
    programs = tuple(tuple(row[-1] for row in sorted(mine)) for mine in timed)
    return replace(
        schedule,
        name=f"{schedule.name}+vocab{barriers}",
        ops=programs,
        vocab_barriers=barriers,
    )
